"""``JobConfig``: everything a user says about a job, checked before anything starts.

Names follow Ray Train where Ray Train has one. Nothing heavy is imported here; the sections of the other packages live
beside the code that they configure.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from checkpointing.config import ProtectionConfig
from checkpointing.layout import Layout
from orchestrator.config_errors import ConfigError, known_keys
from orchestrator.config_sections import JobSection, RunConfig, ScalingConfig, WorkerGroupConfig
from orchestrator.config_yaml import apply_overrides, dump_yaml, load_yaml
from orchestrator.ray_names import from_ray
from pipelines.config import DataConfig
from workers.config import DecoderConfig, OptimizerConfig, TrainingConfig
from workers.limits import layout_problem

# What may change between two drivers of one run: it moves work around or ends it sooner or later, but step s still
# consumes batch s and updates the parameters by the same rule. All other keys make the job digest.
TUNING_KEYS = (
    "run",
    "scaling",
    "groups",
    "layout",
    "protection",
    "orphan_grace_s",
    "data.num_readers",
    "data.prefetch_steps",
    "training.max_steps",
    "training.max_tokens",
    "training.max_time_s",
    "training.micro_batch_rows",
    "training.schedule",
    "training.eval_every",
    "training.eval_rows",
)


class JobConfig(JobSection):
    """A job. Has either ``scaling`` (one implicit group) or ``groups``. Raises ConfigError, one sentence."""

    run: RunConfig = RunConfig()
    scaling: ScalingConfig | None = None
    groups: tuple[WorkerGroupConfig, ...] | None = None
    layout: str | tuple[str, ...] = Field("auto", description="a layout, a list in order of preference, or auto")
    model: DecoderConfig | str = Field(DecoderConfig(), description="the built-in decoder, or 'package.module:build'")
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    protection: ProtectionConfig = ProtectionConfig()
    orphan_grace_s: float = Field(120.0, gt=0, description="how long the state outlives its driver")

    @field_validator("run", mode="before")
    @classmethod
    def _run_from_ray(cls, value: object) -> object:
        return from_ray(value, "RunConfig", RunConfig)

    @field_validator("scaling", mode="before")
    @classmethod
    def _scaling_from_ray(cls, value: object) -> object:
        return from_ray(value, "ScalingConfig", ScalingConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_groups(self)
        if isinstance(self.model, str) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.model):
            raise ConfigError(
                "model", f"is {self.model!r}; allowed: a mapping of DecoderConfig or 'package.module:build'"
            )
        training = self.training
        if training.max_steps is None and training.max_tokens is None and training.max_time_s is None:
            raise ConfigError(
                "training", "has no end: give at least one of training.max_steps, max_tokens and max_time_s"
            )
        if training.max_steps is None and training.max_tokens is None and self.optimizer.decay_steps is None:
            raise ConfigError(
                "optimizer.decay_steps", "is missing; it is needed when neither max_steps nor max_tokens is given"
            )
        if training.eval_every and not self.data.eval_fraction:
            raise ConfigError(
                "data.eval_fraction", f"is 0, so nothing is held out for training.eval_every={training.eval_every}"
            )
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise ConfigError(
                "optimizer.betas", f"is {list(self.optimizer.betas)}; allowed: two numbers from 0 to less than 1"
            )
        if self.protection.snapshot_every != "auto" and self.protection.snapshot_every < 1:
            raise ConfigError(
                "protection.snapshot_every",
                f"is {self.protection.snapshot_every!r}; allowed: a whole number of at least 1, or 'auto'",
            )
        check_layouts(self)
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
        """Read a job from a file; ``overrides`` are ``--set`` texts applied before anything is checked.

        Raises ConfigError for what is wrong in it and FileNotFoundError (or another OSError) when it cannot be read.
        """
        try:
            data = load_yaml(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError("", f"{path} is not UTF-8 text (byte {error.start})") from None
        return cls.from_dict(_mapping({} if data is None else data), overrides)

    @classmethod
    def from_text(cls, text: str) -> JobConfig:
        """The inverse of ``to_yaml``."""
        return cls.from_dict(_mapping(load_yaml(text)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Iterable[str] = ()) -> JobConfig:
        merged = apply_overrides(dict(data), overrides)
        for key in merged:
            if not isinstance(key, str):
                raise ConfigError(str(key), "is not text; keys of a job are text")
        try:
            return cls(**merged)
        except RecursionError:
            raise ConfigError("", "a job is nested too deeply, or a YAML alias in it holds itself") from None

    def with_overrides(self, overrides: Iterable[str]) -> JobConfig:
        """This job with ``["training.max_steps=5", ...]`` set; values are YAML."""
        job = self.from_dict(self.to_dict(), overrides)
        return job.model_copy(update={"run": job.run.model_copy(update={"callbacks": self.run.callbacks})})

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return dump_yaml(self.to_dict())

    @property
    def group(self) -> WorkerGroupConfig:
        """The worker group, whether it was given or is implied by ``scaling``."""
        if self.groups is not None:
            return self.groups[0]
        assert self.scaling is not None
        return WorkerGroupConfig(scaling=self.scaling, layout=self.layout)

    @property
    def decay_steps(self) -> int:
        """Steps until the learning rate is lowest: as given, else the steps that the end conditions allow."""
        if self.optimizer.decay_steps is not None:
            return self.optimizer.decay_steps
        if self.training.max_steps is not None:
            return self.training.max_steps
        assert self.training.max_tokens is not None
        return math.ceil(self.training.max_tokens / (self.training.global_batch_rows * self.data.seq_len))

    def resolved(self, before: JobConfig | None = None) -> JobConfig:
        """This job with ``optimizer.decay_steps`` filled in: that of ``before`` (the run so far) where it is not given.

        A longer run must not bend the learning-rate schedule of the steps it has made, so an open ``decay_steps`` is
        settled once, when the run begins.
        """
        steps = self.optimizer.decay_steps or (before or self).decay_steps
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"decay_steps": steps})})

    @property
    def digest(self) -> str:
        """Hash (32 hex digits) of all that must stay the same when a run is resumed: every key but TUNING_KEYS."""
        text = json.dumps(self._fixed(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def differences(self, other: JobConfig) -> tuple[str, ...]:
        """Dotted keys of the digest in which two jobs differ, in the order of the configuration."""
        ours, theirs = _flat(self._fixed()), _flat(other._fixed())
        order = {key: index for index, key in enumerate(known_keys(JobConfig))}
        differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        return tuple(sorted(differing, key=lambda key: (order.get(key, 0), key)))

    def _fixed(self) -> dict[str, Any]:
        data = self.resolved().to_dict()
        for key in TUNING_KEYS:
            *sections, name = key.split(".")
            section = data
            for part in sections:
                section = section[part]
            del section[name]
        return data


def candidate_layouts(config: JobConfig) -> tuple[Layout, ...] | Literal["auto"]:
    """The group's layouts in order of preference, or "auto"."""
    layout = config.group.layout
    if layout == "auto":
        return "auto"
    return tuple(Layout.parse(text) for text in ((layout,) if isinstance(layout, str) else layout))


def check_layouts(config: JobConfig) -> None:
    """All that can be said of layouts without a cluster. Raises ConfigError.

    The largest layout must fit into the most workers and the smallest into the fewest, or the range is not true.
    """
    group = config.group
    key, prefix = ("layout", "") if config.groups is None else ("groups.0.layout", "groups.0.")
    if isinstance(config.model, DecoderConfig):
        _check_model(config.model)
    try:
        layouts = candidate_layouts(config)
    except ValueError as error:
        raise ConfigError(key, str(error).removeprefix("layout ")) from None
    if layouts == "auto":
        return
    if not layouts:
        raise ConfigError(key, "is an empty list; allowed: a layout such as 'dp2·tp2', a list of them, or auto")
    for layout in layouts:
        problem = layout_problem(layout, config.model, config.data.vocab_size, config.training.global_batch_rows)
        if problem is not None:
            raise ConfigError(key, f"{layout} {problem}")
        if layout.size > group.scaling.max_workers:
            raise ConfigError(
                key, f"{layout} needs {layout.size} workers, more than {prefix}scaling.num_workers={_workers(group)}"
            )
    smallest = min(layouts, key=lambda layout: layout.size)
    if smallest.size > group.scaling.min_workers:
        raise ConfigError(
            key,
            f"offers nothing for {group.scaling.min_workers} workers ({prefix}scaling.num_workers={_workers(group)}): "
            f"the smallest, {smallest}, needs {smallest.size}",
        )


def _workers(group: WorkerGroupConfig) -> str:
    return str(group.scaling.num_workers)


def _check_model(model: DecoderConfig) -> None:
    if model.dim % model.num_heads or (model.dim // model.num_heads) % 2:
        raise ConfigError(
            "model.dim",
            f"is {model.dim}; allowed: an even multiple of model.num_heads={model.num_heads} (rotary pairs)",
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            "model.num_kv_heads", f"is {model.num_kv_heads}; allowed: a divisor of model.num_heads={model.num_heads}"
        )


def _check_groups(config: JobConfig) -> None:
    if config.scaling is None and config.groups is None:
        raise ConfigError("scaling", "is missing; for example scaling: {num_workers: 4} (or groups: [...])")
    if config.scaling is not None and config.groups is not None:
        raise ConfigError("groups", "and scaling are both given; a job has one of them")
    if config.groups is not None:
        if len(config.groups) != 1:
            raise ConfigError(
                "groups", f"has {len(config.groups)} entries; exactly one worker group is supported so far"
            )
        if config.layout != "auto":
            raise ConfigError("layout", f"is {config.layout!r}; with groups, each group has its own layout")


def _mapping(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError("", f"a job is a mapping of keys, not {data!r}")
    return data


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat
