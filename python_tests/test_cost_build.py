"""Builders price what was measured and invent nothing in between."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dcut_kernels.cost import (
    AngelSlimRatios,
    CostTable,
    Fingerprint,
    PaperRatios,
    TokenCounts,
    additive,
    captured_cost,
    from_captured_sizes,
    from_ratios,
    interpolate,
    merge,
)
from python_tests.published_costs import by_number, published

B300 = published("b300_v4flash_tp4_tokens")
SIZES, VERIFY_MS, ABOVE = B300["tokens"][:-1], B300["cost"][:-1], {B300["tokens"][-1]: B300["cost"][-1]}
DRAFT_MS = by_number(B300["draft_by_requests"])


def test_ratios_by_either_convention() -> None:
    costs = {8: [2, 3], 1: [1, 2]}
    table = from_ratios(costs, [0.5, 1], 15, plain_ms={1: 0.5, 8: 1}, draft_ms={8: 0.2, 1: 0.1})
    assert table == CostTable((1, 8), ((1, 2), (2, 3)), PaperRatios((0.5, 1), 15), (0.5, 1), (0.1, 0.2))
    assert from_ratios(costs, [0.5, 1], 15, "angelslim").rule == AngelSlimRatios((0.5, 1), 15)


def test_captured_sizes_are_steps_and_their_end_is_a_cliff() -> None:
    price = [captured_cost(tokens, SIZES, VERIFY_MS, ABOVE) for tokens in range(1, 1601)]
    assert [price[n - 1] for n in (1, 2, 128, 129, 256, 257, 512, 513, 1024)] == [
        5.1, 9.5, 9.5, 11.5, 11.5, 16.2, 16.2, 20.6, 20.6,
    ]  # fmt: skip
    assert set(price[:1024]) == set(VERIFY_MS)  # nothing between them
    assert price[1024] == 104.0
    # one point above: as steep as the last two captured sizes
    assert price[1511] == pytest.approx(104 + (1512 - 1025) * (20.6 - 16.2) / 512)
    assert min(price[1024:]) == 104.0


def test_above_the_captured_sizes_costs_are_on_a_line() -> None:
    measured = {1100: 110.0, 1500: 130.0, 2000: 180.0}
    for tokens, cost in ((1025, 106.25), (1100, 110), (1300, 120), (1500, 130), (1750, 155), (2000, 180), (2100, 190)):
        assert captured_cost(tokens, SIZES, VERIFY_MS, measured) == pytest.approx(cost)


def test_table_of_captured_sizes() -> None:
    table = from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS, max_tokens=1025, above=ABOVE, batches=[1, 86, 256])
    assert table.rule == TokenCounts((1, 128, 256, 512, 1024, 1025))
    assert table.draft_ms == pytest.approx((0.9, 0.9 + 4.5 * 85 / 255, 5.4))
    for row, draft in zip(table.costs_ms, table.draft_ms, strict=True):
        assert row == pytest.approx([draft + cost for cost in B300["cost"]])
    _, costs = table.dense(256)
    assert (costs[:, 5] - costs[:, 4]).tolist() == pytest.approx([104 - 20.6] * 256, abs=1e-4)
    assert from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS).rule == TokenCounts(tuple(SIZES))


@pytest.mark.parametrize(
    ("max_tokens", "step_above", "counts"),
    [(1600, 256, (1280, 1536, 1600)), (1536, 256, (1280, 1536)), (1030, None, (1030,)), (1027, 1, (1025, 1026, 1027))],
)
def test_buckets_above_the_captured_sizes(max_tokens: int, step_above: int | None, counts: tuple[int, ...]) -> None:
    table = from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS, max_tokens, step_above, above=ABOVE)
    assert table.rule == TokenCounts((*SIZES, *counts))


def test_additive_costs_are_on_lines() -> None:
    entry = published("h200_qwen3_14b_tokens")
    verify = dict(zip(entry["tokens"], entry["cost"], strict=True))
    draft = by_number(entry["draft_by_requests"])
    table = additive(draft, verify, PaperRatios((0.25, 1.0), 15), batches=[1, 64, 128])
    slope = (42.34 - 8.77) / (1024 - 16)
    drafts = 1.74, 1.74 + (7.37 - 1.74) * 63 / 127, 7.37
    assert table.draft_ms == pytest.approx(drafts)
    expected = (
        (8.71, 8.77),  # 4 tokens cost as much as the 8 that were measured
        (8.77 + 240 * slope, 42.34),
        (8.77 + 496 * slope, 42.34 + 1024 * slope),
    )
    for row, draft_ms, verified in zip(table.costs_ms, drafts, expected, strict=True):
        assert row == pytest.approx([draft_ms + cost for cost in verified])
    assert additive({1: 2.0}, {1: 3.0}, [1, 9], plain_ms={1: 1.0}) == CostTable(
        (1,), ((5.0, 5.0),), TokenCounts((1, 9)), (1.0,), (2.0,)
    )
    assert additive({8: 1.0, 16: 3.0}, {1: 3.0}, [32], batches=[4, 12, 20]).draft_ms == (1, 2, 4)


def test_other_buckets_on_the_lines_between_measured_ones() -> None:
    table = CostTable((1, 4), ((2.0, 5.0), (8.0, 14.0)), AngelSlimRatios((0.0, 1.0), 3), (1.0, 2.0))
    finer = interpolate(table, AngelSlimRatios(tuple(k / 3 for k in range(4)), 3))
    assert finer.costs_ms == ((2, 3, 4, 5), (8, 10, 12, 14))
    assert finer.plain_ms == (1, 2)
    with pytest.raises(
        ValueError, match=r"^rule: expected budgets inside the priced ones at batch 1, 1 to 4 tokens, got 8$"
    ):
        interpolate(table, TokenCounts((4, 8)))
    holes = CostTable((1,), ((2.0, math.inf, 6.0),), TokenCounts((1, 2, 5)))
    assert interpolate(holes, TokenCounts((1, 2, 3, 5))).costs_ms == ((2, 3, 4, 6),)


def test_merged_tables_hold_the_batches_of_all() -> None:
    rule, mark = TokenCounts((8, 16)), Fingerprint("d", "m", "e", "t")
    first = CostTable((1, 4), ((1, 2), (3, 4)), rule, (0.1, 0.4), (0.2, 0.3), mark)
    second = CostTable((2,), ((5, 6),), rule, (0.7,), (0.8,), mark)
    assert merge([first, second]) == merge([second, first])
    assert merge([first, second]) == CostTable(
        (1, 2, 4), ((1, 2), (5, 6), (3, 4)), rule, (0.1, 0.7, 0.4), (0.2, 0.8, 0.3), mark
    )
    assert merge([first]) == first
    for other, message in (
        (replace(second, batches=(4,)), "each batch in one table, got batch 4 in two"),
        (
            replace(second, rule=TokenCounts((8, 17))),
            r"the same rule in all, TokenCounts\(counts=\(8, 16\)\), got Token",
        ),
        (replace(second, fingerprint=None), r"the same fingerprint in all, Fingerprint\(.*\), got None"),
        (replace(second, plain_ms=None), "plain_ms in all or in none, got some with and some without"),
        (replace(second, draft_ms=None), "draft_ms in all or in none, got some with and some without"),
    ):
        with pytest.raises(ValueError, match=rf"^tables: expected {message}"):
            merge([first, other])
    with pytest.raises(ValueError, match=r"^tables: expected at least one table, got 0$"):
        merge([])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: from_ratios({1: [1]}, [1], 7, "vllm"), "convention: expected one of paper, angelslim, got 'vllm'"),
        (lambda: from_ratios({1: [1]}, [1], 7, plain_ms={2: 1}), "plain_ms: expected the batches 1, got [2]"),
        (lambda: captured_cost(1512, SIZES, VERIFY_MS),
         "above: expected costs above 1024 tokens, the last captured size, to price 1512, got None"),
        (lambda: captured_cost(1512, SIZES, VERIFY_MS, {1024: 20.6}),
         "above: expected token counts above 1024, the last captured size, got 1024"),
        (lambda: captured_cost(9, [8], [1.0], {9: 2.0}),
         "above: expected two points or two captured sizes, to know how cost grows, got 1"),
        (lambda: from_captured_sizes(SIZES, VERIFY_MS[1:], DRAFT_MS),
         "verify_ms: expected 5 values, as in sizes, got 4"),
        (lambda: from_captured_sizes(SIZES[::-1], VERIFY_MS, DRAFT_MS),
         "sizes: expected strictly ascending values, got (1024, 512, 256, 128, 1)"),
        (lambda: from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS, 1024, above=ABOVE),
         "max_tokens: expected an int from 1025 to 2147483647, got 1024"),
        (lambda: from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS, step_above=8),
         "step_above: expected None without max_tokens, got 8"),
        (lambda: from_captured_sizes(SIZES, VERIFY_MS, DRAFT_MS, 2000, 1, above=ABOVE),
         "step_above: expected a distance that gives at most 256 buckets, got 1, which gives 981"),
        (lambda: from_captured_sizes(range(1, 258), [1.0] * 257, DRAFT_MS),
         "sizes: expected 1 to 256 buckets, got 257"),
        (lambda: additive({}, {1: 1.0}, [1]), "draft_ms: expected a mapping with at least one point, got {}"),
        (lambda: additive({1: 1.0}, {1: math.nan}, [1]),
         "verify_ms: expected finite values of 0 and above, got {1: nan}"),
        (lambda: additive({1: 1.0}, {0: 1.0}, [1]), "verify_ms: expected an int from 1 to 2147483647, got 0"),
        (lambda: additive({1: 1.0}, {1: 1.0}, range(1, 258)), "budgets: expected 1 to 256 buckets, got 257"),
    ],
)  # fmt: skip
def test_errors(build: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build()
    assert str(error.value) == message


def test_lines_that_fall_below_zero_are_refused() -> None:
    message = r"^verify_ms: expected points whose line stays above 0, got -3\.571 ms at 16 tokens$"
    with pytest.raises(ValueError, match=message):
        additive({1: 1.0}, {1: 5.0, 8: 1.0}, [4, 16])
    for tokens in (0, -5):
        with pytest.raises(ValueError, match=r"^tokens: expected an int from 1 to "):
            captured_cost(tokens, [8], [1.0])
