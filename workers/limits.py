"""Which layouts a model can be trained under. No torch here: the driver asks before anything starts."""

from __future__ import annotations

from checkpointing.layout import Layout
from workers.config import DecoderConfig
from workers.program import Program


def check_layout(program: Program, layout: Layout) -> None:
    """Raise ValueError, in one sentence, when ``program`` cannot be trained under ``layout``."""
    model, training = program.model, program.training
    if isinstance(model, DecoderConfig):
        divided = {
            "model.num_heads": model.num_heads,
            "model.num_kv_heads": model.num_kv_heads,
            "model.ffn_dim": model.ffn_dim,
            "data.vocab_size": program.vocab_size,
        }
        for key, value in divided.items():
            if value % layout.tp:
                raise ValueError(f"layout {layout}: tp{layout.tp} does not divide {key}={value}")
        if layout.pp > model.num_layers:
            raise ValueError(f"layout {layout}: pp{layout.pp} has more stages than model.num_layers={model.num_layers}")
    elif layout.pp > 1 or layout.tp > 1:
        raise ValueError(
            f"layout {layout}: a model given as a build function is data-parallel only (axes dp and r, not pp or tp)"
        )
    if training.global_batch_rows < layout.data_size:
        raise ValueError(
            f"layout {layout}: its {layout.data_size} data ranks (r times dp) need a row each, "
            f"more than training.global_batch_rows={training.global_batch_rows}"
        )
