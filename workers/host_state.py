"""A rank's training state as numpy arrays: the tensors' own memory on a CPU, a pinned mirror of it on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from checkpointing.schema import Piece
from workers.device import Device


class HostState:
    """``arrays`` has one array per piece; ``pull`` brings some up to date, ``push`` writes all to the device."""

    def __init__(self, state: Mapping[Piece, torch.Tensor], device: Device) -> None:
        self._state, self._device = state, device
        if device.kind == "cpu":
            self._mirror = dict(state)
        else:
            self._mirror = {
                piece: device.host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                for piece, tensor in state.items()
            }
        self.arrays: dict[Piece, np.ndarray] = {piece: tensor.numpy() for piece, tensor in self._mirror.items()}

    def pull(self, pieces: Iterable[Piece]) -> None:
        if self._device.kind != "cpu":
            with self._device.copying():
                for piece in pieces:
                    self._mirror[piece].copy_(self._state[piece], non_blocking=True)

    def push(self) -> None:
        if self._device.kind != "cpu":
            with self._device.copying():
                for piece, tensor in self._state.items():
                    tensor.copy_(self._mirror[piece], non_blocking=True)
