"""A whole training state with random values: parameters of the built-in decoder, and AdamW's."""

from __future__ import annotations

import numpy as np

from checkpointing.layout import Layout
from checkpointing.schema import Piece, Schema, pieces
from workers.config import DecoderConfig, OptimizerConfig, TrainingConfig
from workers.models.spec import describe
from workers.program import Program


def training_state(quick: bool) -> tuple[Schema, dict[Piece, np.ndarray]]:
    """500 MB in one layout of one rank (quick: a tenth), the same at every call."""
    model = DecoderConfig(dim=256 if quick else 640, num_layers=4 if quick else 8, ffn_dim=512 if quick else 1792)
    schema = describe(Program(model, OptimizerConfig(), TrainingConfig(max_steps=1), 1024 if quick else 4096, 32))
    rng = np.random.default_rng(0)
    specs = {spec.name: spec for spec in schema.tensors}
    boxes = pieces(schema, Layout(), 0)
    return schema, {box: rng.random(box.size).astype(specs[box.name].dtype).reshape(box.size) for box in boxes}
