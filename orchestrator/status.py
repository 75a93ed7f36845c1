"""How far a run has come, read from its folder alone: works while it runs, after it, and without Ray."""

from __future__ import annotations

from typing import Any

from orchestrator.runfolder import RunFolder

_OF_THE_LAST_STEP = ("step", "loss", "total_tokens", "layout", "world_size", "generation", "goodput")


def read_status(folder: RunFolder) -> dict[str, Any]:
    """Plain JSON. ``state`` is "running", "finished", "stopped", "failed" or "driver gone"."""
    lease = folder.lease
    metrics, events = folder.read_metrics(), folder.read_events()
    incidents = [event for event in events if "incident" in event]
    state = "driver gone" if lease is None or (lease.status == "running" and not lease.live) else lease.status
    last = metrics[-1] if metrics else {}
    return {
        "name": folder.name,
        "path": folder.url,
        "state": state,
        **{
            key: last.get(key)
            for key in ("step", "loss", "total_tokens", "layout", "world_size", "generation", "goodput")
        },
        "incidents": len(incidents),
        "incident_seconds": round(sum(incident["seconds"] for incident in incidents), 3),
        "steps_run_again": sum(incident["steps_run_again"] for incident in incidents),
    }


def describe_run(status: dict[str, Any]) -> str:
    """Two lines for people."""
    where = f"run {status['name']} in {status['path']}: {status['state']}"
    if status["step"] is None:
        return f"{where}\nno step has been committed yet"
    return (
        f"{where}\nstep {status['step']}, loss {status['loss']:.4f}, layout {status['layout']} on "
        f"{status['world_size']} workers (generation {status['generation']}), goodput {status['goodput']:.1%}, "
        f"{status['incidents']} incidents ({status['incident_seconds']:g} s), "
        f"{status['steps_run_again']} committed steps run again"
    )
