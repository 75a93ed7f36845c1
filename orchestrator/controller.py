"""The controller: an explicit state machine that keeps a job training whatever joins or dies.

    Planning -> Starting -> Training -> Finishing
                   ^           |
                   |           v (a failure, or a resize at a step boundary)
                   +-- Resharding <- Replanning <- Quiescing
                                        |
                                        +-- Waiting (too few workers; the state stays in memory)

Every transition is an event. Decisions are made by the pure functions of ``policies`` and ``recovery``; processes are
talked to through ``Nodes``, ``Readers`` and ``Running``; ``Membership`` keeps up with who is there, ``Survival`` with
what is left of the state.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from checkpointing.cover import StateLost
from checkpointing.layout import Layout
from checkpointing.schema import Schema
from checkpointing.transfer import Holding
from orchestrator.config import JobConfig
from orchestrator.generation import ANSWER_S, LAST_CALL_S, Ended, Running, Survivors, call_roll
from orchestrator.ledger import Ledger, Phase
from orchestrator.membership import Membership
from orchestrator.nodes import Nodes
from orchestrator.policies import End, FailurePolicy, choose_layout
from orchestrator.readers import Readers
from orchestrator.recovery import NextGeneration, Source, plan_generation
from orchestrator.saver import Saver
from orchestrator.stop import StopRequest
from orchestrator.survival import Survival
from workers.plan import Order, Plan
from workers.program import Program

_TICK_S = 0.25


class State(enum.Enum):
    PLANNING = "planning"
    STARTING = "starting"
    TRAINING = "training"
    QUIESCING = "quiescing"
    REPLANNING = "replanning"
    RESHARDING = "resharding"
    WAITING = "waiting"
    FINISHING = "finishing"


class JobFailed(Exception):
    """The job cannot go on; the message says why, in a sentence for the user."""


class Controller:
    """Runs one job to its end. ``run`` raises JobFailed when it cannot go on; ``step`` is the last committed one."""

    def __init__(
        self,
        config: JobConfig,
        program: Program,
        nodes: Nodes,
        readers: Readers,
        ledger: Ledger,
        saver: Saver,
        stop: StopRequest,
        on_step: Callable[[dict[str, Any]], None],
        preferred: Sequence[Layout] | None,
        is_possible: Callable[[Layout], bool],
        first_generation: int,
    ) -> None:
        self._config, self._program = config, program
        self._nodes, self._readers = nodes, readers
        self._ledger, self._saver, self._stop, self._on_step = ledger, saver, stop, on_step
        self._preferred, self._is_possible = preferred, is_possible
        failure = config.run.failure_config
        self._failures = FailurePolicy(failure.max_failures, failure.max_identical_failures)
        self._bound_s = failure.detect_bound_s
        self.generation = first_generation - 1
        self.step = 0
        self._plan: Plan | None = None
        self._membership = Membership(nodes, readers, ledger)
        self._pinned: tuple[int, int] | None = None  # generation and step of a checkpoint that is due

    def run(self) -> None:
        self._enter(State.PLANNING)
        schema = self._start()
        if schema is None:
            return
        self._schema = schema
        self._survival = Survival(schema, self._nodes, self._saver.directory, self._ledger)
        try:
            source = self._survival.first()
        except StateLost as lost:
            raise JobFailed(str(lost)) from None
        self.step = source.step
        while not self._config.training.is_over(source.step, source.tokens):
            upcoming = self._replan(source)
            if upcoming is None:  # stopped while waiting for workers: the keepers still have the state
                break
            ended = self._train(upcoming)
            if ended.kind == "finished" or (ended.kind == "paused" and self._stop.requested):
                self._finish(self.generation, ended.step)
                return
            source = self._resized(upcoming.plan) if ended.kind == "paused" else self._failed(ended, upcoming)
            if self._stop.check():  # while a generation recovered: the next one may never make a step
                break
        # No further step is to be made; only the last one's checkpoint may be missing.
        if self._ledger.open_incident is not None:
            self._ledger.open_incident.close(generation=self.generation, source_tier=source.tier)
        self._finish(source.generation, source.step)

    def _finish(self, generation: int, step: int) -> None:
        self._enter(State.FINISHING)
        if step and self._saver.save(self._schema, self._nodes, generation, step) is None:
            raise JobFailed(f"step {step} is made, but its checkpoint could not be written; events.jsonl says why")

    # Start

    def _start(self) -> Schema | None:
        """Admit the nodes there are and wait until their workers are warm; one of them works out the schema.

        None when the job is to stop before that.
        """
        self._enter(State.STARTING)
        while True:
            if not self._warm_up():
                return None
            try:
                self._readers.check()
                self._saver.check_shared(self._nodes)
                first = next(iter(self._nodes.ready_workers().values()))
                return ray.get(first.actor.describe.remote(self._program))
            except ray.exceptions.RayActorError:
                # Somebody died before the first step: go on with the others.
                self._membership.forget(*call_roll(self._nodes))

    def _warm_up(self) -> bool:
        """Wait until all workers of the nodes there are have started and there are enough. False: stop instead."""
        minimum = self._config.group.scaling.min_workers
        self._membership.look()
        while not self._membership.is_warm(minimum):
            if self._stop.check():
                return False
            if self._membership.cannot_start is not None:
                raise JobFailed(f"workers do not start: {self._membership.cannot_start}")
            self._membership.look()
            time.sleep(_TICK_S)
        return True

    # Plan

    def _replan(self, source: Source) -> NextGeneration | None:
        """The next generation, once there are workers for one; None when the job is to stop before that."""
        self._enter(State.REPLANNING)
        self._phase("replan")
        while (upcoming := self._plan_from(source)) is None:
            if not self._wait_for_workers():
                return None
            source = self._newest(self._survival.inventory()) if source.tier == "memory" else source
        return upcoming

    def _plan_from(self, source: Source) -> NextGeneration | None:
        workers = {name: handle.node for name, handle in self._nodes.ready_workers().items()}
        if len(workers) < self._config.group.scaling.min_workers:
            return None
        return plan_generation(
            generation=self.generation + 1,
            schema=self._schema,
            source=source,
            preferred=self._preferred,
            is_possible=self._is_possible,
            workers=workers,
            domains=self._nodes.domains,
            protection=self._config.protection,
            memory=self._nodes.arena_memory,
            previous=self._plan,
        )

    def _wait_for_workers(self) -> bool:
        """Too few workers: the state stays in memory while processes warm up and nodes join. False: stop instead."""
        self._enter(State.WAITING)
        before = set(self._nodes.ready_workers())
        while not set(self._nodes.ready_workers()) - before:
            if self._stop.check():
                return False
            self._membership.look()
            time.sleep(_TICK_S)
        return True

    # Train

    def _train(self, upcoming: NextGeneration) -> Ended:
        plan = self._plan = upcoming.plan
        self._unprotected_since = time.time()
        self.generation = plan.generation
        self._pinned = None
        self._enter(State.RESHARDING)
        self._phase("regroup")
        self._ledger.plan(plan)
        for worker in plan.spares:
            self._nodes.ready_workers()[worker].actor.rest.remote()
        self._running = Running(plan, self._orders(upcoming), self._nodes.ready_workers(), self._bound_s)
        asked = False
        while True:
            reports, ended = self._running.wait(_TICK_S)
            for report in reports:
                self._on_report(report, upcoming)
            if ended is not None:
                if ended.kind != "failed":
                    for report in self._running.drain():
                        self._on_report(report, upcoming)
                return ended
            # While a generation recovers, its first step needs the processors more than a new standby does.
            if self._membership.look(refill=self._ledger.open_incident is None):
                self._running.use_readers(self._readers)
            # Not before the first step: until then a worker may not have its order yet, and would not remember.
            begun = self.step > upcoming.source.step
            if begun and not asked and (self._stop.check() or self._better_layout(plan)):
                asked = True
                self._running.stop_after_step()

    def _orders(self, upcoming: NextGeneration) -> list[Order]:
        plan, transfer, source = upcoming.plan, upcoming.transfer, upcoming.source
        keepers = {node.name: node.keeper for node in self._nodes}
        return [
            Order(
                generation=plan.generation,
                layout=plan.layout,
                rank=rank,
                program=self._program,
                schema=self._schema,
                rendezvous=keepers[plan.members[0].node],
                fetches=transfer.fetches[rank] if transfer else None,
                node=member.node,
                keepers=keepers,
                keeper=keepers[member.node],
                written=upcoming.protected.written[rank],
                sends=upcoming.protected.sends[rank],
                readers=self._readers.preference(member.node),
                step=source.step,
                spared=(source.generation, source.step) if source.replaces else None,
                cursor=source.cursor,
                tokens=source.tokens,
                snapshot_every=self._config.protection.snapshot_every,
                durable_every=self._config.run.checkpoint_config.every_steps,
                detect_bound_s=self._bound_s,
                log=self._saver.folder.log_location(plan.generation, member.node, rank),
            )
            for rank, member in enumerate(plan.members)
        ]

    def _on_report(self, report: dict[str, Any], upcoming: NextGeneration) -> None:
        """Take note of what a rank says; an incident ends with the first step after it."""
        if report["kind"] == "regrouped":
            self._phase("reshard")
        elif report["kind"] == "taken_over":
            self._phase("rework")
        elif report["kind"] == "step":
            if report["step"] == upcoming.source.step + 1:
                # The first vote of a generation says that its first snapshot is held: older ones may go.
                for node in self._nodes:
                    node.keeper.release.remote(upcoming.plan.generation)
                self._protected(upcoming)
                self._enter(State.TRAINING)
            self.step = report["step"]
            self._on_step(self._ledger.step(report, upcoming.plan))
            if self._pinned is not None:  # the vote of this step says that every keeper has the pins of the one before
                self._saver.save_in_background(self._schema, self._nodes, *self._pinned)
            self._pinned = (upcoming.plan.generation, report["step"]) if report["durable"] else None
            self._recovered(upcoming)

    def _protected(self, upcoming: NextGeneration) -> None:
        """Its first snapshot is held as the plan has it, wherever it sends what: the state is as safe as it gets."""
        incident, plan = self._ledger.open_incident, upcoming.plan
        since = incident.since if incident is not None else self._unprotected_since
        seconds = round(time.time() - since, 6)
        self._ledger.event("protected", step=plan.step, survives=plan.survives, scheme=plan.scheme, seconds=seconds)

    def _recovered(self, upcoming: NextGeneration) -> None:
        incident, transfer = self._ledger.open_incident, upcoming.transfer
        if incident is not None:
            incident.close(
                generation=upcoming.plan.generation,
                layout_after=str(upcoming.plan.layout),
                num_workers=len(upcoming.plan.members),
                source_tier=upcoming.source.tier,
                bytes_moved=transfer.bytes_moved if transfer else 0,
                bytes_lower_bound=transfer.bytes_lower_bound if transfer else 0,
            )

    def _better_layout(self, plan: Plan) -> bool:
        """Whether the workers that are ready now allow a layout that the job would rather have."""
        num_ready = len(self._nodes.ready_workers())
        if num_ready <= len(plan.members) + len(plan.spares):
            return False
        best = choose_layout(self._preferred, num_ready, self._is_possible, lambda layout: layout != plan.layout)
        return best is not None and best != plan.layout

    # What survives

    def _resized(self, plan: Plan) -> Source:
        now = time.time()
        incident = self._ledger.incident("resize", "more workers are ready", plan, since=now, noticed=now)
        incident.begin("quiesce")
        return self._newest(self._survival.inventory())

    def _failed(self, ended: Ended, upcoming: NextGeneration) -> Source:
        """Fence the generation, see what is left, and decide how to go on. Raises JobFailed when it cannot."""
        self._enter(State.QUIESCING)
        noticed = time.time()
        survivors = self._quiesce(ended, upcoming)
        if survivors.raised is not None and not ended.raised:
            ended = survivors.raised
        if not self._survival.is_complete(survivors.holdings):
            # A node that is only slow must not cost the state.
            survivors = self._quiesce(ended, upcoming, LAST_CALL_S)
        since = ended.since or noticed
        incident = self._ledger.incident("failure", ended.cause, upcoming.plan, since=since, noticed=noticed)
        incident.add_phase("quiesce", time.time() - noticed)
        incident.lost(nodes=survivors.dead_nodes, workers=survivors.dead_workers)
        incident.begin("replan")
        self._membership.forget(survivors.dead_workers, survivors.dead_nodes)
        if ended.unusable is not None:
            self._survival.distrust(ended.unusable)
        sentence = ended.cause.strip().splitlines()[-1]
        # What an error of the user's says may differ each time (a number, an address): its type does not.
        kind = sentence.partition(":")[0] if ended.raised and ended.unusable is None else sentence
        decision = self._failures.decide(kind, sentence, self.step)
        try:
            if isinstance(decision, End):
                self._save_what_is_left(survivors.holdings)
                raise JobFailed(decision.reason)
            source = self._newest(survivors.holdings)
        except JobFailed as failure:
            incident.close(generation=self.generation, ended=str(failure))
            raise
        incident.steps_run_again = max(0, self.step - source.step)
        self.step = source.step
        return source

    def _save_what_is_left(self, holdings: Sequence[Holding]) -> None:
        """The job ends, but what it made need not be lost with it."""
        with contextlib.suppress(JobFailed):
            source = self._newest(holdings)
            if source.tier == "memory":
                self._saver.save(self._schema, self._nodes, source.generation, source.step)

    def _quiesce(self, ended: Ended, upcoming: NextGeneration, patience: float = ANSWER_S) -> Survivors:
        survivors = self._running.quiesce(ended, self._nodes, patience)
        for report in survivors.reports:
            self._on_report(report, upcoming)
        return survivors

    def _newest(self, holdings: Sequence[Holding]) -> Source:
        try:
            return self._survival.newest(holdings, self.step, self._plan)
        except StateLost as lost:
            raise JobFailed(
                f"{lost}; there is no durable checkpoint to fall back to "
                f"(run.checkpoint_config.every_steps is {self._config.run.checkpoint_config.every_steps})"
            ) from None

    def _enter(self, state: State) -> None:
        self._ledger.event("state", state=state.value, step=self.step)

    def _phase(self, phase: Phase) -> None:
        """Time spent from here on counts for ``phase`` of the incident that is open, if one is."""
        if self._ledger.open_incident is not None:
            self._ledger.open_incident.begin(phase)
