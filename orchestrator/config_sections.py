"""The sections of a job that the orchestrator owns: where the run lives, how many workers, what ends it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from checkpointing.config import CheckpointConfig
from orchestrator.config_errors import ConfigError, config_error
from orchestrator.ray_names import from_ray
from workers.config import Section


def _plain(value: Any, key: str = "") -> Any:
    """Lists as tuples (sections are strict and frozen). Infinities and NaN are refused: JSON has no words for them."""
    if isinstance(value, dict):
        return {name: _plain(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, key) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, f"is {value!r}; allowed: finite numbers")
    return value


class JobSection(Section):
    """A section whose mistakes are one ``ConfigError`` sentence also when it is built in Python."""

    if not TYPE_CHECKING:  # type checkers see pydantic's own signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**_plain(values))
            except ValidationError as error:
                raise config_error(type(self), error) from None


class FailureConfig(JobSection):
    """When failures end the job. Unlike Ray Train's, a job lives by default."""

    max_failures: int = Field(-1, ge=-1, description="incidents after which the job ends; -1 is no limit")
    max_identical_failures: int = Field(3, ge=1, description="equal failures without a committed step between them")
    detect_bound_s: float = Field(5.0, gt=0, description="a silent worker is given up after this long")


class RunConfig(JobSection):
    """Where the run lives. ``name`` None: a name is made from the time."""

    name: str | None = Field(None, description="the run's folder below storage_path; null makes a name from the time")
    storage_path: str = Field("runs", description="a folder, s3://bucket/prefix or any pyarrow URI")
    failure_config: FailureConfig = FailureConfig()
    checkpoint_config: CheckpointConfig = CheckpointConfig()
    callbacks: tuple[Any, ...] = Field((), exclude=True, description="ray.train.UserCallback objects; from Python only")

    @field_validator("failure_config", mode="before")
    @classmethod
    def _failure_from_ray(cls, value: object) -> object:
        return from_ray(value, "FailureConfig", FailureConfig)

    @field_validator("checkpoint_config", mode="before")
    @classmethod
    def _checkpoint_from_ray(cls, value: object) -> object:
        return from_ray(value, "CheckpointConfig", CheckpointConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name):
            allowed = "at most 100 letters, digits, '.', '_' and '-', as in 'my-run-1'"
            raise ConfigError("name", f"is {self.name!r}; allowed: {allowed}")
        if not self.storage_path:
            raise ConfigError("storage_path", "is ''; allowed: a folder, s3://bucket/prefix or any pyarrow URI")
        if urlsplit(self.storage_path).password:
            raise ConfigError("storage_path", "holds a password, which would be written down; pass it by environment")
        for callback in self.callbacks:
            if not all(callable(getattr(callback, name, None)) for name in ("after_report", "after_exception")):
                raise ConfigError("callbacks", f"holds {callback!r}; allowed: ray.train.UserCallback objects")
        return self


class ScalingConfig(JobSection):
    """How many workers, each with what. ``num_workers`` (min, max) makes the group elastic."""

    num_workers: int | tuple[int, int] = Field(1, description="how many, or [min, max]: elastic between the two")
    use_gpu: bool = Field(False, description="one GPU per worker, unless resources_per_worker says otherwise")
    resources_per_worker: dict[str, float] | None = Field(None, description="Ray resources; default one CPU")
    accelerator_type: str | None = Field(None, description="as Ray names it, for example A100")
    label_selector: dict[str, str] | None = Field(None, description="only nodes with these Ray labels")
    standbys_per_node: int = Field(1, ge=0, description="warm processes per node that can take a dead worker's place")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ConfigError(
                "num_workers",
                f"is {self.num_workers!r}; allowed: a whole number of at least 1, or (min, max) with 1 <= min <= max",
            )
        for name, amount in (self.resources_per_worker or {}).items():
            if amount < 0:
                raise ConfigError(f"resources_per_worker.{name}", f"is {amount!r}; allowed: a number of at least 0")
        if not any(amount > 0 for amount in self.worker_resources().values()):
            raise ConfigError("resources_per_worker", "asks for nothing; a worker needs some of a resource (CPU: 0.1)")
        return self

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    def worker_resources(self) -> dict[str, float]:
        """Ray resources of one worker; by default one CPU, and with ``use_gpu`` one GPU."""
        return {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {}), **(self.resources_per_worker or {})}


class WorkerGroupConfig(JobSection):
    """One worker group: a whole model replica under one inner layout."""

    name: str = "main"
    scaling: ScalingConfig = ScalingConfig()
    layout: str | tuple[str, ...] = Field("auto", description="a layout, a list in order of preference, or auto")

    @field_validator("scaling", mode="before")
    @classmethod
    def _scaling_from_ray(cls, value: object) -> object:
        return from_ray(value, "ScalingConfig", ScalingConfig)
