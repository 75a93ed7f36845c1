"""``ElasticTrainer``: checks a job, brings together all that drives it, and cleans up whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.erasure import check_code
from checkpointing.layout import Layout
from orchestrator.callbacks import Callbacks, RunContext
from orchestrator.cluster import connect, lasting_path, living_nodes
from orchestrator.config import JobConfig, candidate_layouts
from orchestrator.controller import Controller, JobFailed
from orchestrator.lease import LeaseLost
from orchestrator.ledger import Ledger
from orchestrator.nodes import Nodes
from orchestrator.one_place import package_in_the_way
from orchestrator.own_model import Build, find_build, send_by_value
from orchestrator.progress import event_line
from orchestrator.readers import Readers
from orchestrator.renewal import renewing
from orchestrator.runfolder import Acquired, RunFolder, new_run_name
from orchestrator.saver import Saver
from orchestrator.stop import StopRequest
from pipelines.corpus import Corpus
from pipelines.tokenizer import train_or_load
from workers.config import DecoderConfig
from workers.limits import layout_problem
from workers.program import Program

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: "finished", "stopped" or "failed" (then ``error`` says why).

    ``metrics``: the last step's line of metrics.jsonl; ``incidents``: the lines of all incidents.
    """

    path: str
    status: str
    metrics: dict[str, Any]
    incidents: tuple[dict[str, Any], ...]
    error: JobFailed | None


class ElasticTrainer:
    """Trains one job to its end on whatever workers there are.

    ``model``: the user's ``build(vocab_size, seq_len) -> nn.Module`` as a function, instead of ``config.model``.
    ``folders``: where a ``config.model`` of the form "package.module:build" is looked for before the current folder.
    """

    def __init__(self, config: JobConfig, *, model: Build | None = None, folders: Sequence[Path] = ()) -> None:
        self._config = config
        self._model = model
        self._folders = (*folders, Path.cwd())

    def fit(self, *, resume: bool = False, address: str | None = None, on_step: OnStep = lambda line: None) -> Any:
        """Train; returns Ray Train's ``Result`` with ``incidents`` added. Raises ValueError for what the user can mend.

        A job that could not go on is in ``Result.error`` (a JobFailed), as Ray has it.
        """
        from orchestrator.result import as_result

        return as_result(self.run(resume=resume, address=address, on_step=on_step))

    def run(self, *, resume: bool = False, address: str | None = None, on_step: OnStep = lambda line: None) -> JobEnd:
        """``fit`` without Ray Train's classes, which take seconds to import.

        ``on_step`` is given each step's line of metrics.jsonl, and {"message": text} for what people want to know.
        """
        config = self._config
        problem = package_in_the_way()
        if problem is not None:
            raise ValueError(problem)
        storage_path = lasting_path(config.run.storage_path)
        folder = RunFolder(storage_path, config.run.name or new_run_name())
        corpus = Corpus.open(config.data.text)
        if config.training.eval_every:
            corpus.require_held_out(config.data.eval_fraction)
        if config.protection.scheme != "replica" and config.protection.survive:
            check_code(2, config.protection.survive)
        model = self._resolve_model()
        preferred, is_possible = _layouts(config, model)
        try:
            acquired = folder.acquire(config, resume=resume)
        except OSError as error:
            raise ValueError(f"run.storage_path {storage_path} cannot be used: {error.strerror or error}") from None
        job = acquired.job
        stop = StopRequest(folder, config.training.max_time_s)
        callbacks = Callbacks(config.run.callbacks, RunContext(folder.name, config.run, config.group.scaling))
        last: dict[str, Any] = {}

        def say(message: str) -> None:
            on_step({"message": message})

        def note_step(line: dict[str, Any]) -> None:
            last.clear()
            last.update(line)
            on_step(line)
            callbacks.on_step(line)

        def note_event(line: dict[str, Any]) -> None:
            sentence = event_line(line)
            if sentence is not None:
                say(sentence)
            callbacks.on_event(line)

        ledger = Ledger(folder, note_event)
        status: Any = "failed"
        error: JobFailed | None = None
        try:
            with connect(address, say), stop.on_signals():  # in this order: Ray puts handlers of its own in place
                nodes = Nodes(config.group.scaling, config.orphan_grace_s)
                _check_resources(config, nodes)
                say(acquired.message)
                program = Program(model, job.optimizer, job.training, job.data.vocab_size, job.data.seq_len)
                tokenizer = folder.keep_text("tokenizer.json", lambda: train_or_load(corpus, job.data.vocab_size))
                rows, seed = job.training.global_batch_rows, job.training.seed
                reader_args = (corpus.manifest(), tokenizer, job.data, rows, seed)
                readers = Readers(job.data.num_readers, job.orphan_grace_s, reader_args)
                saver = Saver(folder, job.run.checkpoint_config, ledger)
                first = max(folder.read_plans(), default=0) + 1
                controller = Controller(
                    job, program, nodes, readers, ledger, saver, stop, note_step, preferred, is_possible, first
                )
                with _cleaned_up(nodes, readers, saver), renewing(nodes, readers, folder, stop, job.orphan_grace_s):
                    try:
                        controller.run()
                        status = "stopped" if stop.requested else "finished"
                    except JobFailed as failure:
                        error = failure
                        ledger.event("failed", cause=str(failure))
                    ledger.event("ended", status=status, step=controller.step)
                callbacks.finish(last)
                reached = last or _line_of(folder, controller.step)
                return JobEnd(folder.url, status, reached, tuple(ledger.incidents), error)
        except LeaseLost as lost:
            # The run's files are the other driver's now; nothing more is written.
            return JobEnd(folder.url, status, last, tuple(ledger.incidents), JobFailed(str(lost)))
        finally:
            _give_back(folder, acquired, status, began=error is not None)

    def _resolve_model(self) -> DecoderConfig | Build:
        """The decoder's configuration, or the user's build function, which travels to the workers by value."""
        model = self._model or self._config.model
        if isinstance(model, DecoderConfig):
            return model
        build = find_build(model, self._folders) if isinstance(model, str) else model
        send_by_value(build)
        return build


def _line_of(folder: RunFolder, step: int) -> dict[str, Any]:
    """What an earlier driver wrote of ``step`` (0: of the last one): where a run stands whose driver made no step."""
    return next((line for line in reversed(folder.read_metrics()) if step in (0, line["step"])), {})


def _layouts(config: JobConfig, model: Any) -> tuple[tuple[Layout, ...] | None, Callable[[Layout], bool]]:
    """The job's layouts in order of preference (None: auto), and which layouts its model can take."""

    def problem(layout: Layout) -> str | None:
        return layout_problem(layout, model, config.data.vocab_size, config.training.global_batch_rows)

    candidates = candidate_layouts(config)
    if candidates == "auto":
        return None, lambda layout: problem(layout) is None
    for layout in candidates:
        found = problem(layout)
        if found is not None:
            raise ValueError(f"layout {layout} {found}")
    return candidates, lambda layout: True


def _check_resources(config: JobConfig, nodes: Nodes) -> None:
    """Refuse at once what this cluster cannot hold, saying what there is and what would fit."""
    there = {node.ray_id[:8]: nodes.capacity(node) for node in living_nodes()}
    minimum, fits = config.group.scaling.min_workers, sum(there.values())
    if fits < minimum:
        need = " + ".join(f"{amount:g} {name}" for name, amount in nodes.per_worker.items())
        each = ", ".join(f"{count} on {name}" for name, count in there.items()) or "no node"
        raise ValueError(
            f"the job needs at least {minimum} workers of {need} each, but the cluster has room for {fits} ({each}); "
            f"set scaling.num_workers to {max(fits, 1)} or less with a layout of that size, or ask for less per worker"
        )


@contextlib.contextmanager
def _cleaned_up(nodes: Nodes, readers: Readers, saver: Saver) -> Iterator[None]:
    try:
        yield
        saver.wait()  # but for an interrupt, and for a run that is another driver's now
    finally:
        readers.shut_down()
        nodes.shut_down()


def _give_back(folder: RunFolder, acquired: Acquired, status: Any, began: bool) -> None:
    """End the lease; the folder of a new run that was refused before it ``began`` goes again."""
    if status == "failed" and not began and not acquired.resumed and not folder.read_plans():
        folder.discard()
    else:
        with contextlib.suppress(LeaseLost):
            folder.finish(status)
