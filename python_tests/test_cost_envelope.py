"""The integer envelope is the lower convex envelope of a row, exact in its own integers."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_kernels.cost import CostTable, PaperRatios, TokenCounts, integer_envelope
from python_tests.published_costs import paper_table

LAST = 2**31 - 1
COSTS = st.floats(1, 100) | st.sampled_from([math.inf, math.nan, 0.0, -1.0])
ROWS = st.lists(st.tuples(st.integers(1, 256), COSTS), min_size=1, max_size=12).map(lambda row: sorted(row, key=budget))


def budget(point: tuple[int, float]) -> int:
    return point[0]


def chords(points: list[tuple[int, Fraction]], place: int) -> Fraction | None:
    """The lowest chord between two of the points at a place: their envelope, by its definition."""
    heights = [y for x, y in points if x == place]
    heights += [
        y0 + (y1 - y0) * (place - x0) / (x1 - x0) for x0, y0 in points for x1, y1 in points if x0 < place < x1
    ]  # fmt: skip
    return min(heights, default=None)


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_envelope_of_random_rows(row: list[tuple[int, float]]) -> None:
    budgets, costs = zip(*row, strict=True)
    points = [(place, Fraction(cost)) for place, cost in row if 0 < cost < math.inf]
    result = integer_envelope(budgets, costs)
    exact = {place: chords(points, place) for place in budgets}
    inside = [(place, *pair) for place, pair in zip(budgets, result, strict=True) if exact[place] is not None]
    assert all(pair == (0, 0) for place, pair in zip(budgets, result, strict=True) if exact[place] is None)
    if not points:
        return
    assert abs(max(height for _, height, _ in inside) - 2**30) <= 256
    unit = max(exact[place] for place, _, _ in inside) / 2**30
    for place, height, _ in inside:
        assert abs(height * unit - exact[place]) < exact[place] / 2**15
        assert height * unit <= exact[place]
    for (left, low, slope), (right, high, next_slope) in pairwise(inside):
        assert slope <= next_slope
        assert (low, slope) == (high, next_slope) if left == right else high == low + slope * (right - left)
    assert inside[-1][2] == LAST


def test_corners_chords_and_disabled_buckets() -> None:
    costs = [math.inf, 2.0, 9.0, 3.0, math.nan, 4.0, 8.0, 0.0]
    result = integer_envelope([1, 8, 16, 16, 20, 24, 28, 40], costs)
    unit = 2**27  # 8 ms are 2^30
    assert result == [
        (0, 0),  # below what is priced
        (2 * unit, unit // 8),
        (3 * unit, unit // 8),  # the cheaper of two counts
        (3 * unit, unit // 8),
        (3 * unit + unit // 2, unit // 8),  # disabled, but inside
        (4 * unit, unit),
        (8 * unit, LAST),
        (0, 0),
    ]
    assert integer_envelope([4, 8], [math.inf, 0.0]) == [(0, 0), (0, 0)]
    assert integer_envelope([4], [7.5]) == [(2**30, LAST)]


def test_a_falling_row_has_negative_slopes() -> None:
    assert integer_envelope([1, 5, 9], [8.0, 4.0, 4.0]) == [(2**30, -(2**27)), (2**29, 0), (2**29, LAST)]


def test_rounding_that_would_move_the_envelope_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^budgets: expected heights within 2\^-15 .* got 0\.999999 instead of 1\.01 at 60000"
    ):
        integer_envelope([1, 60000, 60001], [1.0, 1.01, 1000.0])
    rows = CostTable((1, 2), ((1.0, 1.01, 1000.0),) * 2, TokenCounts((1, 60000, 60001)))
    with pytest.raises(ValueError, match=r"differ too much, at batch 1$"):
        rows.envelope(2)


def test_envelopes_of_a_table() -> None:
    table = paper_table("h20")
    budgets, costs = table.dense(64)
    envelope = table.envelope(64)
    assert (envelope.dtype, tuple(envelope.shape)) == (torch.int32, (64, 4, 2))
    for row, places, prices in zip(envelope.tolist(), budgets.tolist(), costs.tolist(), strict=True):
        assert [tuple(pair) for pair in row] == integer_envelope(places, prices)
    # batch 1: 8 tokens are cheaper than 4, so the envelope falls first
    slopes = envelope[0, :, 1].tolist()
    assert slopes[0] < 0 < slopes[1]
    assert CostTable((1,), ((1.0, 2.0),), PaperRatios((0.5, 1.0), 1)).envelope(1)[0, 0, 1] == 2**29


def test_lookup_is_that_of_dense() -> None:
    table = CostTable((1, 3), ((1.0, 2.0), (1.0, 4.0)), PaperRatios((0.5, 1.0), 1))
    assert table.envelope(3, "linear")[1, 0].tolist() == [2**30 // 3, (2**30 * 2 // 3) // 2]
