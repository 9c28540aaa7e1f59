"""Cost tables say what was measured, at every batch, and lead to the published choices."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

import dcut_kernels
from dcut_kernels.cost import AngelSlimRatios, CostTable, PaperRatios, Rule, TokenCounts
from python_tests.published_costs import paper_table, published

DEVICES = ("h20", "h800")
HALVES = PaperRatios((0.5, 1.0), 15)


def table(*rows: tuple[float, ...], batches: tuple[int, ...] = (4, 8), rule: Rule = HALVES, **fields: Any) -> CostTable:
    return CostTable(batches, rows, rule, **fields)


@pytest.mark.parametrize(
    ("rule", "batch", "budgets"),
    [
        (PaperRatios((0.25, 0.5, 0.75, 1.0), 15), 32, (128, 256, 384, 512)),
        (PaperRatios((0.01, 0.3), 9), 10, (10, 30)),  # 0.3 * 10 * 10 is 30, and the bonus tokens always fit
        (PaperRatios((0.28, 0.55, 0.56), 9), 10, (28, 55, 56)),  # each of these times 100 is too much in floats
        (PaperRatios((1 / 7, 5 / 7), 6), 7, (7, 35)),  # the float 5 / 7 is above the fraction
        (PaperRatios((0.3,), 15), 1, (5,)),
        (AngelSlimRatios((0.0, 0.3, 1.0), 10), 10, (10, 40, 110)),
        (AngelSlimRatios(tuple(k / 15 for k in range(16)), 15), 7, tuple(7 + 7 * k for k in range(16))),
        (TokenCounts((1, 8, 512)), 100, (1, 8, 512)),
    ],
)
def test_budgets(rule: Rule, batch: int, budgets: tuple[int, ...]) -> None:
    assert rule.budgets(batch) == budgets


def test_dense_rows_of_measured_batches_are_what_was_published() -> None:
    for device in DEVICES:
        entry = published(f"{device}_qwen3_8b")
        budgets, costs = paper_table(device).dense(64)
        assert (budgets.dtype, costs.dtype) == (torch.int32, torch.float32)
        for batch, row in entry["rows"].items():
            assert budgets[int(batch) - 1].tolist() == [int(ratio * int(batch) * 16) for ratio in entry["ratios"]]
            assert torch.equal(costs[int(batch) - 1], torch.tensor(row))


@pytest.mark.parametrize(
    ("lookup", "sources"),
    [
        ("nearest", {1: 4, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8, 12: 16, 13: 16, 16: 16, 40: 16}),
        ("ceil", {1: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16}),
        ("exact", {4: 4, 8: 8, 16: 16}),
    ],
)
def test_which_measured_batch_serves(lookup: str, sources: dict[int, int]) -> None:
    costs = table((1.0, 4.0), (1.0, 8.0), (1.0, 16.0), batches=(4, 8, 16), plain_ms=(4, 8, 16), draft_ms=(0, 8, 16))
    for batch, source in sources.items():
        budgets, prices = costs.step(batch, batch, lookup)
        assert budgets.tolist() == [8 * batch, 16 * batch]
        assert prices.tolist() == [1, source]
        assert costs.plain_at(batch, lookup) == source
        assert costs.draft_at(batch, lookup) == (0 if source == 4 else source)


def test_lines_between_measured_batches_only_on_request() -> None:
    costs = table((10.0, 20.0), (18.0, math.inf), plain_ms=(4, 8), draft_ms=(0, 2))
    budgets, prices = costs.dense(9, "linear")
    assert budgets[:, 0].tolist() == list(range(8, 80, 8))
    assert prices[:, 0].tolist() == [10, 10, 10, 10, 12, 14, 16, 18, 18]
    assert prices[:, 1].tolist() == [20] * 4 + [math.inf] * 5  # between a price and none there is none
    assert (costs.plain_at(5, "linear"), costs.draft_at(7, "linear")) == (5, 1.5)
    assert costs.dense(9)[1][:, 0].tolist() == [10] * 5 + [18] * 4


def test_a_cost_that_disables_is_no_end_of_a_line() -> None:
    costs = table((-1.0, 20.0), (9.0, math.nan), batches=(4, 6))
    assert costs.step(5, 5, "linear")[1].tolist() == [math.inf, math.inf]


def test_times_that_were_not_measured() -> None:
    assert table((1, 2), (3, 4)).plain_at(4) is None
    assert table((1, 2), (3, 4)).draft_at(4) is None


def test_token_counts_below_the_batch_are_disabled() -> None:
    budgets, costs = table((1, 2, 3), (2, 3, 4), rule=TokenCounts((2, 6, 8))).dense(8)
    assert budgets.tolist() == [[2, 6, 8]] * 8
    assert [[cost < math.inf for cost in row] for row in costs.tolist()] == [
        [True] * 3, [True] * 3, *[[False, True, True]] * 4, *[[False, False, True]] * 2,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"^max_batch: expected an int from 1 to 8, got 9$"):
        table((1, 2, 3), (2, 3, 4), rule=TokenCounts((2, 6, 8))).dense(9)


def test_prompts_in_the_same_step() -> None:
    rising = table((10.0, 26.0), (20.0, 52.0))
    budgets, costs = rising.step(4, 104)  # a hundred prompt tokens at 16 ms for 32 tokens
    assert budgets.tolist() == [132, 164]
    assert costs.tolist() == [60, 76]
    budgets, costs = rising.step(0, 10)  # nobody has drafts: priced as the smallest batch
    assert budgets.tolist() == [10, 10]
    assert costs.tolist() == [15, 31]
    falling = table((10.0, 9.0), (20.0, 52.0))
    assert falling.step(4, 104)[1].tolist() == [10, 9]  # prompt tokens have no negative price
    captured = table((1.0, 2.0, 3.0), (2.0, 3.0, 4.0), rule=TokenCounts((4, 64, 128)))
    budgets, costs = captured.step(4, 100)
    assert budgets.tolist() == [4, 64, 128]
    assert costs.tolist() == [math.inf, math.inf, 3]


def test_a_step_without_prompts_is_a_row_of_dense() -> None:
    for lookup in ("nearest", "ceil", "linear"):
        budgets, costs = paper_table("h20").dense(64, lookup)
        for batch in range(1, 65):
            step_budgets, step_costs = paper_table("h20").step(batch, batch, lookup)
            assert torch.equal(step_budgets, budgets[batch - 1])
            assert torch.equal(step_costs, costs[batch - 1])


def test_bypass_disables_all_but_full_verification_where_pruning_saves_little() -> None:
    costs = table((10.0, 10.4), (10.0, 12.0)).with_bypass(0.05)
    assert costs.costs_ms == ((math.inf, 10.4), (10.0, 12.0))
    assert table((10.5, 10.0), (10.0, 12.0)).with_bypass(0.001).costs_ms[0] == (math.inf, 10.0)
    assert table((10.0, 12.0), (10.0, math.inf)).with_bypass(0.05).costs_ms == ((10.0, 12.0), (10.0, math.inf))
    published_rows = paper_table("h800").with_bypass(0.05)
    off = [batch for batch, row in zip(published_rows.batches, published_rows.costs_ms, strict=True) if math.inf in row]
    assert off == [1, 8]


def test_bypass_with_token_counts_needs_the_draft_length() -> None:
    rule = TokenCounts((2, 8, 16, 64))
    costs = table((1.0, 10.0, 10.2, 30.0), (1.0, 10.0, 13.0, 30.0), batches=(4, 8), rule=rule)
    assert costs.with_bypass(0.05).costs_ms == costs.costs_ms
    # batch 4 has 16 tokens in all, and its bonus tokens do not fit in the bucket of 2
    bypassed = costs.with_bypass(0.05, draft_len=3).costs_ms
    assert bypassed == ((math.inf, math.inf, 10.2, 30.0), costs.costs_ms[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=12))
def test_smoothed_is_isotonic_regression(costs: list[float]) -> None:
    rule = TokenCounts(tuple(range(1, len(costs) + 1)))
    smooth = CostTable((1,), (costs,), rule).smoothed().costs_ms[0]
    np.testing.assert_allclose(smooth, isotonic_regression(costs).x, rtol=1e-12)
    assert all(a <= b for a, b in pairwise(smooth))


def test_smoothed_leaves_disabled_buckets_alone() -> None:
    rule = TokenCounts((8, 16, 24, 32, 40))
    costs = CostTable((1,), ((math.inf, 4.0, 0.0, 2.0, 3.5),), rule).smoothed()
    assert costs.costs_ms == ((math.inf, 3.0, 0.0, 3.0, 3.5),)


@pytest.mark.parametrize("device", DEVICES)
def test_half_the_drafts_win_at_batch_32(device: str) -> None:
    """Drafts whose expected tokens are those that were accepted in the published batch, bonus tokens included."""
    entry = published("dflash16_qwen3_8b_bs32_kept", "acceptance.json")
    accepted, verified = entry["accepted_global_topk"], entry["verified"]
    gained = [accepted[0] - 32, *(b - a for a, b in pairwise(accepted))]
    positions = [verified[0] - 32, *(b - a for a, b in pairwise(verified))]
    scores = [gain / n for gain, n in zip(gained, positions, strict=True) for _ in range(n // 32)]  # of one row, [15]
    confidence = torch.tensor([scores[0], *(b / a for a, b in pairwise(scores))]).repeat(32, 1)
    budgets, costs = paper_table(device).dense(64)
    prefix = dcut_kernels.log_prefix_sum(confidence)
    decision, gains = dcut_kernels.bucket_argmax(prefix, budgets, costs)
    assert decision.tolist() == [1, 256, 256, 256]
    np.testing.assert_allclose(gains.double() / 2**30, accepted, rtol=1e-4)
    assert int((torch.tensor(accepted) / costs[31]).argmax()) == 1
    assert budgets[31].tolist() == verified


def test_dense_tables_serve_every_batch() -> None:
    for device in DEVICES:
        budgets, costs = paper_table(device).dense(64)
        for batch in range(1, 65):
            confidence = torch.rand(batch, 15, generator=torch.Generator().manual_seed(batch))
            ids = torch.zeros(batch, 15, dtype=torch.int32)
            step = dcut_kernels.select_and_pack(confidence, ids, ids[:, 0].clone(), ids[:, 0].clone(), budgets, costs)
            bucket, _, total, padded = step.decision.tolist()
            assert total == padded == int(budgets[batch - 1, bucket])
            utility = step.gains.double() / costs[batch - 1].double()
            assert bucket == int(utility.argmax())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: table((1, 2)), "costs_ms: expected 2 rows, as in batches, got 1"),
        (lambda: table((1, 2), (1, 2, 3)), "costs_ms: expected 2 buckets at batch 8, as in rule, got 3"),
        (lambda: table((1, 2), (1, "2")), "costs_ms: expected a number, got '2'"),
        (lambda: table((1, 2), (1, True)), "costs_ms: expected a number, got True"),
        (lambda: table((1, 2), 3), "costs_ms: expected a list, got 3"),
        (lambda: table(batches=()), "batches: expected at least one batch, strictly ascending, got []"),
        (lambda: table((1, 2), (1, 2), batches=(8, 4)),
         "batches: expected at least one batch, strictly ascending, got [8, 4]"),
        (lambda: table((1, 2), (1, 2), batches=(0, 4)), "batches: expected an int from 1 to 16777216, got 0"),
        (lambda: table((1, 2), (1, 2), rule=None), "rule: expected a rule such as PaperRatios, got None"),
        (lambda: table((1, 2), (1, 2), plain_ms=(1,)), "plain_ms: expected 2 values, as in batches, got 1"),
        (lambda: table((1, 2), (1, 2), draft_ms=(1, -1)),
         "draft_ms: expected finite values of 0 and above, got [1.0, -1.0]"),
        (lambda: table((1, 2), (1, 2), fingerprint="x"), "fingerprint: expected a Fingerprint or None, got 'x'"),
        (lambda: PaperRatios((0.5, 1.5), 15), "ratios: expected values from 0 to 1, got (0.5, 1.5)"),
        (lambda: PaperRatios((1.0, 0.5), 15), "ratios: expected strictly ascending values, got (1.0, 0.5)"),
        (lambda: PaperRatios((), 15), "ratios: expected 1 to 256 buckets, got 0"),
        (lambda: PaperRatios((0.5,), 64), "draft_len: expected an int from 0 to 63, got 64"),
        (lambda: TokenCounts((0, 8)), "counts: expected an int from 1 to 2147483647, got 0"),
        (lambda: TokenCounts(tuple(range(1, 258))), "counts: expected 1 to 256 buckets, got 257"),
        (lambda: table((1, 2), (1, 2)).dense(8, "floor"),
         "lookup: expected one of nearest, ceil, exact, linear, got 'floor'"),
        (lambda: table((1, 2), (1, 2)).dense(8, "exact"), "batch: expected one of 4, 8 (measured), got 1"),
        (lambda: table((1, 2), (1, 2)).dense(9, "ceil"),
         "batch: expected at most 8, the largest that was measured, got 9"),
        (lambda: table((1, 2), (1, 2)).dense(0), "max_batch: expected an int from 1 to 16777216, got 0"),
        (lambda: table((1, 2), (1, 2)).step(4, 3), "base_tokens: expected an int from 4 to 16777216, got 3"),
        (lambda: table((1, 2), (1, 2)).plain_at(4, "x") or table((1, 2), (1, 2), plain_ms=(1, 2)).plain_at(4, "x"),
         "lookup: expected one of nearest, ceil, exact, linear, got 'x'"),
        (lambda: table((1, 2), (1, 2)).with_bypass(-0.1), "gain: expected 0 or more, got -0.1"),
        (lambda: table((1, 2), (1, 2)).with_bypass(0.1, 64), "draft_len: expected an int from 0 to 63, got 64"),
    ],
)  # fmt: skip
def test_errors(build: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build()
    assert str(error.value) == message
