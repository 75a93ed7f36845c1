"""Which layouts a model can be trained under. No torch here: the driver asks before anything starts."""

from __future__ import annotations

from typing import Any

from checkpointing.layout import Layout
from workers.config import DecoderConfig


def layout_problem(layout: Layout, model: Any, vocab_size: int, global_batch_rows: int) -> str | None:
    """Why ``model`` cannot be trained under ``layout`` ("has 4 data ranks, more than ..."), or None when it can.

    ``model`` is a DecoderConfig; anything else is a model of the user's own.
    """
    untrained = [f"{axis}{size}" for axis in ("cp", "ep", "etp", "v") if (size := getattr(layout, axis)) > 1]
    if untrained:
        return f"has {' and '.join(untrained)}, which training cannot do yet; use pp, r, dp and tp"
    if layout.data_size > global_batch_rows:
        return f"has {layout.data_size} data ranks, more than training.global_batch_rows={global_batch_rows}"
    if not isinstance(model, DecoderConfig):
        if layout.tp > 1 or layout.pp > 1 or layout.layers is not None:
            return "cuts the model by tp or pp, which a model of your own cannot be; use dp and r"
        return None
    if layout.pp > model.num_layers:
        return f"has {layout.pp} pipeline stages, more than model.num_layers={model.num_layers}"
    if layout.layers is not None and (0 in layout.layers or sum(layout.layers) != model.num_layers):
        total = f"{'+'.join(map(str, layout.layers))} layers"
        return f"has stages of {total}; each needs one, and together model.num_layers={model.num_layers}"
    divided = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.ffn_dim": model.ffn_dim,
        "data.vocab_size": vocab_size,
    }
    wrong = next((f"{key}={value}" for key, value in divided.items() if value % layout.tp), None)
    return None if wrong is None else f"has tp{layout.tp}, which does not divide {wrong}"
