"""Layouts as text, and the two meshes over the ranks of a stage."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp, r, dp, cp, tp, v = (draw(st.integers(1, 3)) for _ in range(6))
    divisors = [size for size in range(1, 28) if dp * cp * tp % size == 0]
    ep = draw(st.sampled_from(divisors))
    etp = draw(st.sampled_from([size for size in divisors if dp * cp * tp % (ep * size) == 0]))
    layers = draw(st.none() | st.lists(st.integers(0, 4), min_size=pp * v, max_size=pp * v).map(tuple))
    return Layout(pp, r, dp, tp, cp, ep, etp, v, layers)


@given(layouts())
def test_a_layout_is_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(str(layout).replace("·", ".")) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("1", Layout()),
        ("tp2·pp2·dp3", Layout(pp=2, dp=3, tp=2)),
        ("pp2:5+3", Layout(pp=2, layers=(5, 3))),
        ("pp2:1+2+2+1·v2·dp4·cp2·tp2·ep4·etp2", Layout(2, 1, 4, 2, 2, 4, 2, 2, (1, 2, 2, 1))),
    ],
)
def test_what_texts_mean(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp", "'dp' is not an axis with a size"),
        ("dp2·", "'' is not an axis with a size"),
        ("dp2·dp3", "axis 'dp' is given twice"),
        ("dp0", "the size of axis 'dp' must be at least 1"),
        ("dp\u0662", "is not an axis with a size"),
        ("dp\uff12", "is not an axis with a size"),
        ("pp2:3+\u0664", "is not an axis with a size"),
        ("xp2", "unknown axis 'xp'; the axes are pp, v, r, dp, cp, tp, ep and etp"),
        ("dp2:3+4", "'dp2:3+4' gives layers per stage, which only pp takes"),
        ("pp3:3+4", "gives the layers of 2 stages, but pp*v is 3"),
        ("dp4·ep3", "ep*etp=3 does not divide the dp*cp*tp=4 ranks of a stage that experts are dealt to"),
    ],
)
def test_what_is_no_layout_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        Layout.parse(text)
    assert str(error.value).startswith(f"layout {text!r}: ") and sentence in str(error.value)


@pytest.mark.parametrize("text", ["dp" + "9" * 5000, "pp1:" + "9" * 5000, "dp1000000000"])
def test_what_is_too_large_for_a_layout(text: str) -> None:
    with pytest.raises(ValueError) as error:
        Layout.parse(text)
    assert "is too large" in str(error.value) and len(str(error.value)) < 100


@given(layouts())
def test_both_meshes_number_the_same_ranks(layout: Layout) -> None:
    """Dense pp x r x dp x cp x tp and expert pp x r x edp x ep x etp, each row-major over all ranks."""
    ranks = range(layout.size)
    at = [layout.coordinates(rank) for rank in ranks]
    dense = product(*map(range, (layout.pp, layout.r, layout.dp, layout.cp, layout.tp)))
    expert = product(*map(range, (layout.pp, layout.r, layout.edp, layout.ep, layout.etp)))
    assert [(a.pp, a.r, a.dp, a.cp, a.tp) for a in at] == list(dense)
    assert [(a.pp, a.r, a.edp, a.ep, a.etp) for a in at] == list(expert)
    assert [layout.rank(a) for a in at] == list(ranks)
    assert {layout.data_rank(a) for a in at} == set(range(layout.data_size))


@given(layouts(), st.integers(0, 30))
def test_stages_hold_all_layers_in_order(layout: Layout, num_layers: int) -> None:
    if layout.layers is not None:
        num_layers = sum(layout.layers)
    stages = [layout.stage_layers(stage, num_layers) for stage in range(layout.num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert tuple(sizes) == layout.layers or np.ptp(sizes) <= 1
    assert sorted(stage for pp in range(layout.pp) for stage in layout.stages_of(pp)) == list(range(layout.num_stages))


def test_interleaved_stages_go_round_the_pipeline() -> None:
    layout = Layout.parse("pp2:1+2+3+1·v2")
    held = [[list(layout.stage_layers(s, 7)) for s in layout.stages_of(pp)] for pp in range(2)]
    assert held == [[[0], [3, 4, 5]], [[1, 2], [6]]]
