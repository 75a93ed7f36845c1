"""What a user says about the data. Plain pydantic, nothing heavy imported."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class DataConfig(BaseModel):
    """Text, tokenizer and packing. Changing any of these changes the global order."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    text: str | tuple[str, ...] = Field(
        "stdlib", description="'stdlib' (sources of Python's library), or files and folders of UTF-8 text"
    )
    seq_len: int = Field(256, ge=8, description="tokens per packed row")
    vocab_size: int = Field(4096, ge=300, description="size of the byte-level BPE vocabulary")
    window_documents: int = Field(64, ge=1, description="documents that are packed together")
    eval_fraction: float = Field(0.02, ge=0, lt=1, description="share of documents held out for evaluation")
    num_readers: int = Field(2, ge=1, description="reader actors, placed on different nodes where there are several")
    prefetch_steps: int = Field(4, ge=1, description="global batches a reader keeps built ahead")

    @field_validator("text", mode="before")
    @classmethod
    def _list_from_yaml(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value
