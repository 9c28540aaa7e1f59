"""Each rule on an example small enough to check by hand, with the answer written down."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dcut_kernels import VerifyBatch
from dcut_kernels.ops import Backend
from python_tests.compare import POISON

ONE = 1 << 30  # a gain of 1
NAN, INF = math.nan, math.inf
HALVES = [[0.5, 0.5], [0.5, 0.5]]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def select(
    backend: Backend, confidence: list[list[float]], budgets: Any, costs: Any = None, **options: Any
) -> VerifyBatch:
    """Slot i holds the drafts 101 + 10 i, 102 + 10 i, ...; request i has the bonus token 11 + i at position 5 i."""
    scores = torch.tensor(confidence, dtype=torch.float32)
    slots, draft_len = scores.shape
    options = {name: int32(value) if isinstance(value, list) else value for name, value in options.items()}
    batch = len(options["row_index"]) if "row_index" in options else slots
    draft_ids = 101 + 10 * torch.arange(slots)[:, None] + torch.arange(draft_len)
    budgets = int32(budgets)
    costs = torch.ones(budgets.shape) if costs is None else torch.tensor(costs, dtype=torch.float32)
    rows = torch.arange(batch, dtype=torch.int32)
    return backend.select_and_pack(scores, draft_ids.int(), 11 + rows, 5 * rows, budgets, costs, **options)


def kept(backend: Backend, confidence: list[list[float]], budget: int, **options: Any) -> list[int]:
    return select(backend, confidence, [budget], **options).keep_lens.tolist()


def test_ones_and_zeros(backend: Backend) -> None:
    assert kept(backend, [[1, 1, 0], [0, 0, 0]], 6) == [2, 2]


@pytest.mark.parametrize(("budget", "keep"), [(2, [0, 0]), (3, [1, 0]), (4, [1, 1]), (5, [2, 1]), (6, [2, 2])])
def test_order_is_score_then_position_then_request(backend: Backend, budget: int, keep: list[int]) -> None:
    """Scores .5 .25 and .25 .25: of the three quarters, position 1 comes first, then request 0."""
    assert kept(backend, [[0.5, 0.5], [0.25, 1]], budget) == keep


@pytest.mark.parametrize(("budget", "keep"), [(3, [1, 0]), (4, [1, 1]), (5, [2, 1]), (6, [2, 2])])
def test_shifted_scores_leave_out_the_token_itself(backend: Backend, budget: int, keep: list[int]) -> None:
    """Scores 1 .5 and 1 .25, whatever the last confidences are."""
    assert kept(backend, [[0.5, 0], [0.25, 1]], budget, score="shifted") == keep


def test_weights_multiply_order_and_objective(backend: Backend) -> None:
    """Weights 1 and 4 give scores .5 .25 and 2 1, and bonus tokens 1 and 4."""
    weight = torch.tensor([1.0, 4.0])
    keeps = [kept(backend, HALVES, budget, weight=weight) for budget in (3, 4, 5, 6)]
    assert keeps == [[0, 1], [0, 2], [1, 2], [2, 2]]
    gains = select(backend, HALVES, [2, 3, 4, 5, 6], weight=weight).gains.tolist()
    assert [g / ONE for g in gains] == [5, 7, 8, 8.5, 8.75]


@pytest.mark.parametrize(("weight", "gain"), [
    (NAN, 1), (0, 2**-8), (-1, 2**-8), (-INF, 2**-8), (1e-9, 2**-8), (INF, 2**8), (300, 2**8), (0.25, 0.25),
])  # fmt: skip
def test_weights_are_made_harmless(backend: Backend, weight: float, gain: float) -> None:
    assert select(backend, [[0.5]], [1], weight=torch.tensor([float(weight)])).gains.item() == gain * ONE


@pytest.mark.parametrize(("confidence", "read_as"), [
    (NAN, 0), (-1, 0), (-INF, 0), (-0.0, 0), (1.5, 1), (INF, 1), (1e-20, 0),
])  # fmt: skip
def test_confidences_are_made_harmless(backend: Backend, confidence: float, read_as: float) -> None:
    result = select(backend, [[confidence, 1], [0.5, 1]], [4, 6])
    assert result.gains.tolist() == [(2 + max(2 * read_as, 1)) * ONE, (2 + 2 * read_as + 1) * ONE]


@pytest.mark.parametrize(("log", "read_as"), [(NAN, 0), (-INF, 0), (-50, 0), (0, 1), (-0.0, 1), (0.7, 1), (INF, 1)])
def test_logarithms_are_made_harmless(backend: Backend, log: float, read_as: float) -> None:
    assert select(backend, [[log]], [2], log_confidence=True).gains.item() == (1 + read_as) * ONE


def test_scores_below_2_to_the_minus_56_tie(backend: Backend) -> None:
    """The first request is better by far, but both count as 0, and position 1 of the second comes before position 2."""
    assert kept(backend, [[2**-57, 1], [0, 0]], 4) == [1, 1]
    assert kept(backend, [[2**-55, 1], [0, 0]], 4) == [2, 0]


def test_gains_of_every_bucket(backend: Backend) -> None:
    gains = select(backend, HALVES, [2, 3, 4, 5, 6]).gains.tolist()
    assert [g / ONE for g in gains] == [2, 2.5, 3, 3.25, 3.5]
    gains = select(backend, HALVES, [2, 3, 4, 5, 6], count_bonus=False).gains.tolist()
    assert [g / ONE for g in gains] == [0, 0.5, 1, 1.25, 1.5]


@pytest.mark.parametrize(("costs", "bucket", "tokens"), [
    ([1, 1.25, 1.5], 0, 2),  # all have utility 2: the smallest bucket wins
    ([1.1, 1.25, 1.5], 1, 3),
    ([1, 1.25, 1.4], 2, 4),
])  # fmt: skip
def test_largest_gain_per_cost_wins(backend: Backend, costs: list[float], bucket: int, tokens: int) -> None:
    decision = select(backend, HALVES, [2, 3, 4], costs).decision
    assert decision.tolist() == [bucket, tokens, tokens, tokens]


def test_bonus_tokens_decide_unless_left_out(backend: Backend) -> None:
    """Gains 2.5 and 3 with the bonus tokens, .5 and 1 without."""
    assert select(backend, HALVES, [3, 4], [1, 1.5]).decision.tolist() == [0, 3, 3, 3]
    assert select(backend, HALVES, [3, 4], [1, 1.5], count_bonus=False).decision.tolist() == [1, 4, 4, 4]


@pytest.mark.parametrize("cost", [0, -0.0, -1, INF, -INF, NAN])
def test_costs_that_disable(backend: Backend, cost: float) -> None:
    result = select(backend, HALVES, [4, 3], [cost, 100])
    assert result.decision.tolist() == [1, 3, 3, 3]
    assert [g / ONE for g in result.gains.tolist()] == [3, 2.5]
    assert select(backend, HALVES, [4], [cost]).decision.tolist() == [-1, 6, 6, 6]


@pytest.mark.parametrize("budget", [0, -1])
def test_budgets_that_disable(backend: Backend, budget: int) -> None:
    assert select(backend, HALVES, [budget, 3], [0.001, 100]).decision.tolist() == [1, 3, 3, 3]


def test_all_disabled_verifies_everything_that_fits(backend: Backend) -> None:
    assert select(backend, HALVES, [3, 0], [NAN, 1]).decision.tolist() == [-1, 6, 6, 6]
    assert select(backend, HALVES, [3], [0], capacity=5).decision.tolist() == [-1, 5, 5, 5]
    assert select(backend, HALVES, []).decision.tolist() == [-1, 6, 6, 6]


@pytest.mark.parametrize(("budget", "tokens", "padded"), [(1, 2, 2), (4, 4, 4), (6, 6, 6), (9, 6, 9)])
def test_bucket_is_clamped_and_padded(backend: Backend, budget: int, tokens: int, padded: int) -> None:
    assert select(backend, HALVES, [budget]).decision.tolist() == [0, tokens, tokens, padded]


@pytest.mark.parametrize(("budget", "tokens", "padded"), [
    (-7, 2, 3), (0, 2, 3), (3, 3, 3), (4, 4, 5), (5, 5, 5), (6, 6, 6), (100, 6, 6),
])  # fmt: skip
def test_given_budget_replaces_the_choice(backend: Backend, budget: int, tokens: int, padded: int) -> None:
    for given in (budget, int32([budget])):
        result = select(backend, HALVES, [5, 3, 1], [1, NAN, 1], budget=given)
        assert result.decision.tolist() == [-1, tokens, tokens, padded]
        assert [g / ONE for g in result.gains.tolist()] == [3.25, 2.5, 2]


def test_capacity_clamps_the_budget_and_floors_beat_it(backend: Backend) -> None:
    assert kept(backend, HALVES, 6, capacity=3) == [1, 0]
    result = select(backend, HALVES, [6], capacity=3, min_keep=[1, 1])
    assert result.keep_lens.tolist() == [1, 1]
    assert result.decision.tolist() == [0, 4, 4, 6]
    assert result.cu_seqlens.tolist() == [0, 2, 4]
    assert result.token_ids.tolist() == [11, 101, 12]
    assert result.logits_indices.tolist() == [0, 1, 2]


def test_floors_caps_and_draft_lens(backend: Backend) -> None:
    thirds = [[0.5, 0.5, 0.5]] * 4
    assert kept(backend, thirds, 1, min_keep=[0, 2, 9, -1]) == [0, 2, 3, 0]
    assert kept(backend, thirds, 16, draft_lens=[-1, 0, 2, 7]) == [0, 0, 2, 3]
    assert kept(backend, thirds, 16, max_keep=[-1, 0, 2, 7]) == [0, 0, 2, 3]
    keep = kept(backend, thirds, 1, min_keep=[3, 3, 3, 3], max_keep=[1, 0, 9, 3], draft_lens=[3, 3, 2, 3])
    assert keep == [1, 0, 2, 3]


def test_floors_count_in_the_gain_and_not_in_the_order(backend: Backend) -> None:
    """Request 1 has to keep a draft of score .125; the one draft left goes to the better request 0."""
    result = select(backend, [[0.5, 0.5], [0.125, 1]], [4], min_keep=[0, 1])
    assert result.keep_lens.tolist() == [1, 1]
    assert result.gains.tolist() == [2.625 * ONE]


@pytest.mark.parametrize(("num_reqs", "keep", "tokens"), [(2, [2, 2, 0], 6), (0, [0, 0, 0], 0), (-3, [0, 0, 0], 0),
                                                          (9, [2, 2, 2], 9)])  # fmt: skip
def test_padding_rows(backend: Backend, num_reqs: int, keep: list[int], tokens: int) -> None:
    result = select(backend, [[0.5, 0.5]] * 3, [9], num_reqs=[num_reqs], min_keep=[1, 1, 1])
    assert result.keep_lens.tolist() == keep
    assert result.decision.tolist() == [0, tokens, tokens, 9]
    assert result.cu_seqlens.tolist() == [min(3 * i, tokens) for i in range(4)]
    assert result.kv_lens.tolist() == [5 * i + 3 if k else 0 for i, k in enumerate(keep)]


@pytest.mark.parametrize(("num_reqs", "tokens"), [(0, 0), (1, 2), (2, 5), (3, 6)])
def test_tables_by_batch(backend: Backend, num_reqs: int, tokens: int) -> None:
    """Row b - 1 serves batch b, the first row an empty one, the last row all above."""
    budgets = [[9, 2], [5, 9]]
    costs = [[NAN, 1], [1, NAN]]
    decision = select(backend, [[0.5, 0.5]] * 3, budgets, costs, num_reqs=[num_reqs]).decision.tolist()
    assert decision == [0 if num_reqs > 1 else 1, min(tokens, 5), min(tokens, 5), 5 if num_reqs > 1 else 2]


def test_one_table_by_batch_and_one_for_all(backend: Backend) -> None:
    assert select(backend, HALVES, [[3, 9], [4, 9], [5, 9]], [1, NAN]).decision.tolist() == [0, 4, 4, 4]
    assert select(backend, HALVES, [3, 4], [[1, NAN], [NAN, 1], [1, NAN]]).decision.tolist() == [1, 4, 4, 4]


def test_row_index(backend: Backend) -> None:
    """Requests 0 and 2 share slot 2; request 1 is out of range and has no drafts, so its floor is 0."""
    result = select(backend, [[0.5, 0.5], [0.5, 0.5], [1, 0.25]], [7], row_index=[2, 3, 2, -1], min_keep=[0, 2, 0, 1])
    assert result.keep_lens.tolist() == [2, 0, 1, 0]
    assert result.token_ids.tolist() == [11, 121, 122, 12, 13, 121, 14, 0, 0, 0, 0, 0]
    assert result.draft_index.tolist() == [-1, 4, 5, -1, -1, 4, -1, -1, -1, -1, -1, -1]


def test_everything_that_is_packed(backend: Backend) -> None:
    result = select(
        backend, [[1, 1], [0, 0], [1, 0]], [6], pad_token=-9, block_table=[[4, 2], [7, 7], [8, -1]], block_size=11
    )
    assert result.keep_lens.tolist() == [2, 0, 1]
    assert result.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert result.kv_lens.tolist() == [3, 6, 12]
    assert result.token_ids.tolist() == [11, 101, 102, 12, 13, 121, -9, -9, -9]
    assert result.positions.tolist() == [0, 1, 2, 5, 10, 11, 0, 0, 0]
    assert result.request_ids.tolist() == [0, 0, 0, 1, 2, 2, -1, -1, -1]
    assert result.slot_mapping.tolist() == [44, 45, 46, 82, 98, -1, -1, -1, -1]
    assert result.draft_index.tolist() == [-1, 0, 1, -1, -1, 4, -1, -1, -1]
    assert result.logits_indices.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert result.decision.tolist() == [0, 6, 6, 6]
    assert result.gains.tolist() == [6 * ONE]


def test_slots_outside_the_block_table(backend: Backend) -> None:
    """Positions 0 1 2, 5 6 7 and 10 11 12 in blocks of 6: the second block starts at 6, the third does not exist."""
    result = select(backend, [[1, 1]] * 3, [9], block_table=[[3, 5], [1, 0], [2, 4]], block_size=6)
    assert result.slot_mapping.tolist() == [18, 19, 20, 11, 0, 1, 28, 29, -1]
    assert select(backend, [[1, 1]] * 3, [9]).slot_mapping.tolist() == [-1] * 9


def test_base_lens(backend: Backend) -> None:
    """Base tokens before the bonus token keep their place, are not verified, and are left alone."""
    options = {"base_lens": [1, 3, 0], "draft_lens": [2, 0, 2], "capacity": 9}
    result = select(backend, [[1, 0.5]] * 3, [7], **options)
    assert result.keep_lens.tolist() == [1, 0, 1]
    assert result.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert result.kv_lens.tolist() == [2, 6, 12]
    assert result.token_ids.tolist() == [11, 101, 0, 0, 12, 13, 121, 0, 0]
    assert result.positions.tolist() == [0, 1, 0, 0, 5, 10, 11, 0, 0]
    assert result.request_ids.tolist() == [0, 0, -1, -1, 1, 2, 2, -1, -1]
    assert result.draft_index.tolist() == [-1, 0, -1, -1, -1, -1, 4, -1, -1]
    assert result.logits_indices.tolist() == [0, 1, 4, 5, 6, 0, 0, 0, 0]
    assert result.decision.tolist() == [0, 7, 7, 7]
    assert result.gains.tolist() == [5 * ONE]

    out = VerifyBatch.allocate(3, 2, 1, capacity=9)
    for tensor in out:
        tensor.fill_(POISON)
    select(backend, [[1, 0.5]] * 3, [7], **options, out=out)
    assert out.token_ids.tolist() == [11, 101, POISON, POISON, 12, 13, 121, 0, 0]
    assert out.positions.tolist() == [0, 1, POISON, POISON, 5, 10, 11, 0, 0]
    assert out.slot_mapping.tolist() == [-1, -1, POISON, POISON, -1, -1, -1, -1, -1]
    assert out.logits_indices.tolist() == [0, 1, 4, 5, 6, 0, 0, 0, 0]


def test_base_tokens_beyond_the_capacity(backend: Backend) -> None:
    result = select(backend, HALVES, [9], base_lens=[2, 4], capacity=5)
    assert result.cu_seqlens.tolist() == [0, 2, 6]
    assert result.token_ids.tolist() == [0, 11, 0, 0, 0]
    assert result.logits_indices.tolist() == [1, 0, 0, 0, 0]
    assert result.decision.tolist() == [0, 6, 6, 9]


def test_token_offsets_saturate(backend: Backend) -> None:
    top = 2**31 - 1
    result = select(backend, HALVES, [9], base_lens=[top, top], capacity=3)
    assert result.cu_seqlens.tolist() == [0, top, top]
    assert result.decision.tolist() == [0, top, top, top]
    assert result.token_ids.tolist() == [0, 0, 0]


def test_empty_batch_and_empty_drafts(backend: Backend) -> None:
    none = int32([])
    empty = backend.select_and_pack(
        torch.zeros(0, 3), none.reshape(0, 3), none, none, int32([4]), torch.ones(1), capacity=2
    )
    assert [t.tolist() for t in empty] == [
        [], [0], [], [0, 0], [0, 0], [-1, -1], [-1, -1], [-1, -1], [0, 0], [0, 0, 0, 4], [0]
    ]  # fmt: skip
    bare = select(backend, [[], []], [4])
    assert bare.token_ids.tolist() == [11, 12]
    assert bare.decision.tolist() == [0, 2, 2, 4]


def test_prefix_sums(backend: Backend) -> None:
    unit, top = 1 << 20, 2**26 - 1
    confidence = torch.tensor([[0.5, 0.25, 0], [1, 0.5, 2**-60]])
    prefix = backend.log_prefix_sum(confidence)
    assert prefix.tolist() == [[unit, 3 * unit, top], [0, unit, 61 * unit]]
    shifted = backend.log_prefix_sum(confidence, score="shifted", row_index=int32([1, 2, 0]))
    assert shifted.tolist() == [[0, 0, unit], [-1, -1, -1], [0, unit, 3 * unit]]


def test_depths_of_every_bucket(backend: Backend) -> None:
    prefix = int32([[1, 2], [1, 1]]) << 20
    assert backend.segmented_topk(prefix, int32([2, 3, 4, 5, 6, 99])).tolist() == [
        [0, 0], [1, 0], [1, 1], [1, 2], [2, 2], [2, 2]
    ]  # fmt: skip


def test_packing_given_depths(backend: Backend) -> None:
    """Depths are clamped to what exists; nothing was decided, so there is no bucket and no gain."""
    draft_ids, bonus_ids = int32([[101, 102], [111, 112]]), int32([11, 12])
    result = backend.pack_prefixes(int32([7, -7]), draft_ids, bonus_ids, int32([0, 5]))
    assert result.keep_lens.tolist() == [2, 0]
    assert result.token_ids.tolist() == [11, 101, 102, 12, 0, 0]
    assert result.decision.tolist() == [-1, 4, 4, 4]
    assert result.gains.tolist() == []
