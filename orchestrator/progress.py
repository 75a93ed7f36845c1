"""What a driver prints while it trains: a line per second, a sentence per incident, one line at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_STEP_LINE_EVERY_S = 1.0
_CAUSE_CHARACTERS = 160


def progress_line(line: dict[str, Any]) -> str:
    """One line for people from a line of metrics.jsonl, or the text of a message."""
    if "message" in line:
        return str(line["message"])
    evaluated = f"  held-out loss {line['eval_loss']:.4f}" if "eval_loss" in line else ""
    return (
        f"step {line['step']:3d}  loss {line['loss']:.4f}  {line['step_time_s']:.2f} s  "
        f"{line['layout']} on {line['world_size']} workers{evaluated}"
    )


def event_line(event: dict[str, Any]) -> str | None:
    """One sentence for people from a line of events.jsonl; None for what only machines want to know."""
    if "incident" in event:
        return _incident_line(event)
    match event["kind"]:
        case "plan":
            spares = f" ({len(event['spares'])} spare)" if event["spares"] else ""
            survives = _survives(event["survives"], event["asked"])
            return (
                f"{event['layout']} on {len(event['members'])} workers{spares}; memory survives the loss of {survives}"
            )
        case "resumed":
            return f"going on from the checkpoint of step {event['step']}"
        case "node_lost":
            return f"lost {event['node']}"
        case "worker_lost":
            return f"lost worker {event['worker']}"
        case "node_admitted" if event["generation"]:
            return f"{event['node']} joined with {event['num_workers']} workers, which are warming up"
        case "state" if event["state"] == "starting":
            return "starting the workers, and waiting until they are warm"
        case "state" if event["state"] == "waiting":
            return f"waiting for workers; training goes on from step {event['step']}"
        case "fallback":
            return f"going back to the checkpoint of step {event['step']}: {event['cause']}"
        case "start_failed":
            return f"{event['what']} failed to start: {_short(event['cause'])}"
        case "checkpoint_damaged":
            return f"left out, since it is damaged: {event['cause']}"
        case "checkpoint_skipped":
            return f"the checkpoint of step {event['step']} was left out: {_short(event['cause'])}"
        case "checkpoint_failed":
            return f"the checkpoint of step {event['step']} was not written: {event['cause']}"
        case "state_inconsistent":
            return f"the state of step {event['step']} is not the same everywhere: {event['cause']}"
        case "checkpoint":
            return f"checkpoint of step {event['step']} written in {event['seconds']:.2f} s"
    return None


def _survives(number: int, asked: int) -> str:
    if number == 0:
        return "worker processes only: copies need a second node"
    nodes = "any one node" if number == 1 else f"any {number} nodes"
    return f"{nodes} ({asked} asked for, which takes more failure domains)" if number < asked else nodes


def _incident_line(event: dict[str, Any]) -> str:
    lost = event["nodes"] or event["workers"]
    why = f"lost {', '.join(lost)}" if lost else _short(event["cause"])
    what = f"incident {event['incident']}, {event['kind']} ({why})"
    if event.get("outcome") != "recovered":
        return f"{what}: {event.get('ended') or 'more was lost before a step was made; see the next incident'}"
    if event["layout_after"] is None:
        return f"{what}: no step was made after it"
    return (
        f"{what}: {event['layout_before']} -> {event['layout_after']} on {event['num_workers']} workers in "
        f"{event['seconds']:.2f} s, state from {event['source_tier']}, {event['steps_run_again']} steps run again"
    )


def end_line(path: str, status: str, metrics: dict[str, Any], num_incidents: int) -> str:
    """The last line: how far the run came, and its folder."""
    reached = f"at step {metrics['step']}, loss {metrics['loss']:.4f}" if metrics else "before the first step"
    return f"{status} {reached}, {num_incidents} incidents; the run's folder is {path}"


def _short(cause: str) -> str:
    """A cause cut to one line: of a traceback, where it was and the error at its end. events.jsonl has all of it."""
    lines = cause.strip().splitlines() or [""]
    where = lines[0].replace("Traceback (most recent call last):", "").strip(" :")
    line = lines[0] if len(lines) == 1 else f"{where}: {lines[-1]}"
    return line if len(line) <= _CAUSE_CHARACTERS else f"{line[:_CAUSE_CHARACTERS]} ..."


class StepLines:
    """Says every message and every evaluation at once, and of the steps one per second: a log stays readable."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next = 0.0
        self._unsaid: dict[str, Any] | None = None

    def __call__(self, line: dict[str, Any]) -> None:
        if "message" in line:
            self.flush()
            self._say(progress_line(line))
        elif "eval_loss" in line or time.monotonic() >= self._next:
            self._next = time.monotonic() + _STEP_LINE_EVERY_S
            self._unsaid = None
            self._say(progress_line(line))
        else:
            self._unsaid = line

    def flush(self) -> None:
        """Say the newest step if it has not been said: what follows is about it."""
        if self._unsaid is not None:
            self._say(progress_line(self._unsaid))
            self._unsaid = None
