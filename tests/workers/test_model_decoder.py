"""The decoder by itself: slices make the whole, documents do not see each other, padding is harmless."""

from __future__ import annotations

import pytest
import torch

from tests.workers.engine_ranks import MODEL, VOCAB, Rows
from workers.models.decoder import Decoder, rotate, rotation


def inputs(num_rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = Rows.random(num_rows, 0)
    return tuple(torch.from_numpy(array).long() for array in (rows.tokens, rows.positions, rows.segments))


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(MODEL, VOCAB, range(MODEL.num_layers)).double()


@pytest.mark.parametrize("cuts", [(2,), (1, 4), (1, 2, 3, 4)])
def test_stages_make_the_whole(decoder: Decoder, cuts: tuple[int, ...]) -> None:
    hidden, positions, segments = inputs()
    expected = decoder(hidden, positions, segments)
    whole = decoder.state_dict()
    bounds = (0, *cuts, MODEL.num_layers)
    names = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        stage = Decoder(MODEL, VOCAB, range(start, stop), first=start == 0, last=stop == MODEL.num_layers).double()
        stage.load_state_dict({name: whole[name] for name in stage.state_dict()})
        names += stage.state_dict()
        hidden = stage(hidden, positions, segments)
    assert torch.equal(hidden, expected)
    assert names == list(whole)


def test_a_document_does_not_see_its_neighbours(decoder: Decoder) -> None:
    tokens = torch.randint(VOCAB, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    segments = torch.tensor([[1] * 5 + [2] * 7])
    packed = decoder(tokens, positions, segments)
    for part in (slice(0, 5), slice(5, 12)):
        alone = decoder(tokens[:, part], positions[:, part], segments[:, part])
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-12, atol=1e-12)


def test_later_tokens_change_nothing_before_them(decoder: Decoder) -> None:
    tokens, positions, segments = inputs()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCAB
    before, after = decoder(tokens, positions, segments), decoder(changed, positions, segments)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])


def test_rows_of_padding_are_finite(decoder: Decoder) -> None:
    padding = torch.zeros((2, 12), dtype=torch.int64)
    logits = decoder(padding, padding, padding)
    logits.sum().backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in decoder.parameters())


def test_rotation_depends_on_distance_only() -> None:
    query, key = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned = (rotate(x, *rotation(torch.tensor([[p]]), 8, 10000.0)) for x, p in ((query, at), (key, other)))
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(score(3, 1), score(3, 2), rtol=1e-3)
