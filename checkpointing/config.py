"""What a user says about protection and durable checkpoints. Plain pydantic, nothing heavy imported."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_UNITS = {"B": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)}}


def parse_size(text: str) -> int:
    """ "200 MiB" in bytes. Raises ValueError with a sentence."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B)", text.strip())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < 1:
        raise ValueError(f"{text!r} is not a size; write a number and B, KiB, MiB, GiB or TiB, as in '200 MiB'")
    return nbytes


class ProtectionConfig(BaseModel):
    """The memory tier: how often the state is copied, and how many losses it must survive."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    survive: int = Field(
        1, ge=0, le=4, description="losses of failure domains that memory must survive; cut to what the cluster has"
    )
    scheme: Literal["auto", "replica", "parity"] = Field(
        "auto", description="copies, erasure codes (less memory, slower to read), or codes where copies do not fit"
    )
    snapshot_every: int | Literal["auto"] = Field(
        1, description="steps between snapshots; auto keeps the cost under 2 %"
    )


class KeepRule(BaseModel):
    """Which checkpoints one rule keeps: exactly one of `latest`, `every_steps` and `best` (by `metric`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    latest: int | None = Field(None, ge=1, description="the newest so many")
    every_steps: int | None = Field(None, ge=1, description="those whose step is a multiple of this")
    best: int | None = Field(None, ge=1, description="the so many with the best `metric` of their step")
    metric: str = Field("loss", description="a key of metrics.jsonl")
    mode: Literal["min", "max"] = Field("min", description="whether a small or a large `metric` is good")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in (self.latest, self.every_steps, self.best)) != 1:
            raise ValueError("a rule has exactly one of latest, every_steps and best")
        return self


class CheckpointConfig(BaseModel):
    """The durable tier. A checkpoint stays as long as `num_to_keep` or any rule in `keep` asks for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_to_keep: int | None = Field(2, ge=1, description="newest checkpoints kept; null keeps all")
    keep: tuple[KeepRule, ...] = Field((), description="what else is kept, such as [{every_steps: 1000}, {best: 3}]")
    every_steps: int = Field(0, ge=0, description="steps between durable checkpoints; 0 is only at the end")
    max_bandwidth: str | None = Field(
        None, description="most that one node writes in a second, such as 200 MiB; null is no limit"
    )

    @field_validator("max_bandwidth")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value
