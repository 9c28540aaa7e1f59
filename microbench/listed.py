"""Every promise as a case with a name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .build import INT32_MAX, Case, beta, make

INT32_MIN = -INT32_MAX - 1
NAN, INF = math.nan, math.inf


def _beta(rows: int, draft_len: int, seed: int = 0) -> Tensor:
    return beta(np.random.default_rng(seed), rows, draft_len)


def _choice(rows: int, draft_len: int, values: list[float], seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).choice(np.array(values, np.float32), (rows, draft_len)))


def _uniform(rows: int, draft_len: int, low: float, high: float, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).uniform(low, high, (rows, draft_len)).astype(np.float32))


def _confidences() -> Iterator[Case]:
    yield make("all-equal-half", torch.full((8, 7), 0.5), [8, 13, 30, 41, 64])
    yield make("all-equal-odd-value", torch.full((8, 7), 0.7), [8, 13, 30, 41, 64])
    yield make("all-one", torch.ones(8, 7), [8, 13, 30, 41, 64])
    yield make("all-zero", torch.zeros(8, 7), [8, 13, 30, 41, 64])
    yield make("ones-and-zeros", [[1, 1, 0], [0, 0, 0]], [6])
    yield make("nan-negative-above-one-inf", [
        [NAN, 0.5, 0.5], [0.5, NAN, 0.5], [-0.5, 0.9, 0.9], [0.9, -INF, 0.9], [1.5, 0.8, 0.7], [INF, 0.8, 0.7],
        [-0.0, 1.0, 1.0], [-NAN, 0.5, 0.5], [3e38, 0.1, 0.1], [-1e-45, 0.9, 0.9],
    ], [10, 15, 22, 31])  # fmt: skip
    yield make("underflow", torch.full((3, 63), 1e-30), [3, 40, 100, 192])
    yield make("underflow-with-weights", torch.full((3, 63), 1e-30), [3, 40, 100, 192], weight=[1, 256, 300])
    yield make("around-the-zero-score", [
        [2.0**-28, 2.0**-28, 0.5], [2.0**-55, 1, 0.5], [2.0**-56, 1, 1], [2.0**-57, 1, 1], [2.0**-55, 0.51, 0.9],
        [2.0**-55, 0.499999, 0.9], [2.0**-55, 0.500001, 0.9], [2.0**-63, 1, 1], [2.0**-64, 1, 1], [2.0**-65, 1, 1],
    ], [12, 15, 20, 26, 33])  # fmt: skip
    yield make("around-the-zero-score-weighted", torch.tensor([[2.0**-60, 0.5, 0.5, 0.5, 0.5, 0.5]] * 3),
               [5, 9, 12, 16], weight=[64, 256, 1])  # fmt: skip
    yield make("subnormals", [
        [1e-40, 0.5], [2.0**-126, 0.5], [2.0**-127, 0.5], [1.4e-45, 0.5], [0.25, 1e-45], [0.25, 2.0**-126], [0, 0.5],
    ], [9, 12, 15], weight=[1, 1, 1, 256, 1, 1, 1])  # fmt: skip
    below_one = 1 - 2.0**-24
    yield make("next-to-one", [[below_one] * 7, [1 + 2.0**-23] * 7, [below_one, 1] * 3 + [0.5], [1 - 2.0**-20] * 7],
               [4, 9, 14, 23])  # fmt: skip
    yield make("powers-of-two", _choice(9, 8, [1, 0.5, 0.25, 0.125, 2.0**-10]), [9, 14, 30, 47, 70])
    yield make("few-values", _choice(16, 15, [0.3, 0.9, 0.99], seed=1))
    yield make("bfloat16-ties", _uniform(16, 15, 0.9, 1, seed=2).bfloat16())
    yield make("float16-ties", _uniform(16, 15, 0.99, 1, seed=3).half())
    yield make("float16-subnormals", _uniform(4, 7, 0, 1e-6, seed=4).half(), [4, 8, 16, 31])
    yield make("bfloat16-specials", torch.tensor([[NAN, 1.0], [INF, 0.9], [1e-40, 1.0], [0.9, -1.0]]).bfloat16())
    yield make("same-products-in-another-order", [[0.3, 0.7, 0.9], [0.9, 0.7, 0.3], [0.7, 0.3, 0.9]], [4, 6, 8, 11])
    yield make("shifted", _beta(8, 7), score="shifted")
    yield make("shifted-ones-and-zeros", [[1, 1, 0], [0, 0, 0]], [4, 6], score="shifted")
    yield make("shifted-last-confidence-ignored", [[0.5, NAN], [0.5, 1]], [3, 4, 5], score="shifted")
    yield make("count-bonus-off", _beta(8, 7), [8, 9, 30, 64], [1, 1, 3, 9], count_bonus=False)
    yield make("count-bonus-off-weighted", _beta(8, 7), weight=np.linspace(0.1, 3, 8), count_bonus=False)
    yield make("log", _beta(8, 15, seed=5).log(), log_confidence=True)
    yield make("floors-in-many-blocks", torch.zeros(275, 7), [300, 800, 1900], min_keep=[2] * 275)
    yield make("log-shifted", _beta(8, 15, seed=6).log(), log_confidence=True, score="shifted")
    yield make("log-float16", _beta(8, 15, seed=7).log().half(), log_confidence=True)
    yield make("log-bfloat16", _beta(8, 15, seed=8).log().bfloat16(), log_confidence=True)
    yield make("log-specials", [
        [-INF, -0.1], [NAN, -0.1], [0.3, -0.1], [INF, -0.1], [-0.0, 0.0], [-1e-45, -1e-7], [-44.36, -0.1], [-44.37, 0],
        [-44.4, -0.1], [-63.99, 0], [-64, 0], [-64.01, 0], [-1e38, 0], [-3e-7, -7e-7], [-38.8, 0], [-38.9, 0],
    ], [17, 20, 25, 33, 40], log_confidence=True)  # fmt: skip
    yield make("log-underflow", torch.full((2, 63), -0.7), log_confidence=True)


def _rows() -> Iterator[Case]:
    c = _beta(6, 7, seed=10)
    yield make("draft-lens-ragged", c, draft_lens=[0, 1, 3, 5, 6, 7])
    yield make("draft-lens-zero", c, draft_lens=[0] * 6)
    yield make("draft-lens-out-of-range", c, draft_lens=[-1, 8, INT32_MIN, INT32_MAX, 7, 0])
    yield make("floors", c, [1, 20, 30, 48], min_keep=[0, 2, 0, 7, 3, 1])
    yield make("floors-out-of-range", c, [1, 20, 48], min_keep=[-1, 8, INT32_MIN, INT32_MAX, 3, 1])
    yield make("floors-above-caps", c, [1, 20, 48], min_keep=[5, 2, 7, 7, 3, 1], max_keep=[2, 3, 0, -1, INT32_MIN, 9])
    yield make("floors-above-draft-lens", c, [1, 20, 48], min_keep=[5] * 6, draft_lens=[0, 1, 2, 5, 7, 9])
    yield make("floors-above-capacity", c, [1, 9, 48], min_keep=[7] * 6, capacity=9)
    yield make("caps", c, max_keep=[0, 1, 2, 7, INT32_MAX, INT32_MIN])
    yield make("all-row-bounds", c, draft_lens=[7, 5, 3, 7, 7, 2], min_keep=[1, 4, 0, 2, 9, 9],
               max_keep=[5, 3, 7, 2, 6, 4])  # fmt: skip
    yield make("weights-powers-of-two", torch.full((6, 7), 0.5), weight=[1, 2, 0.5, 0.25, 256, 2.0**-8])
    yield make("weights-not-powers-of-two", c, weight=[0.3, 1.7, 3.14159, 0.9999, 200.5, 0.005])
    yield make("weights-special", c, weight=[NAN, 0, -3, INF, 1e30, 1e-30])
    yield make("weights-more-specials", c, weight=[-INF, 2.0**-8, 2.0**8, 2.0**-9, -0.0, 1 + 2.0**-23])
    yield make("weights-move-the-budget", c, [6, 20, 48], [10, 20, 48], weight=[0.01, 0.01, 0.01, 9, 9, 9])
    yield make("weights-shifted", c, weight=[0.3, 1.7, 3.14159, 0.9999, 200.5, 0.005], score="shifted")
    table = _beta(9, 7, seed=11)
    yield make("row-index", table, row_index=[8, 0, 3, 5, 1])
    yield make("row-index-out-of-range", table, row_index=[9, -1, 3, INT32_MIN, INT32_MAX, 0])
    yield make("row-index-duplicates", table, row_index=[4, 4, 4, 2, 4])
    yield make("row-index-more-rows-than-slots", table, row_index=[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2])
    yield make("row-index-empty-table", torch.zeros(0, 7), row_index=[0, -1, 1])
    yield make("row-index-no-rows", table, row_index=np.zeros(0, np.int32))
    yield make("row-index-out-of-range-floors", table, [1, 9, 40], row_index=[9, 4, -1], min_keep=[3, 3, 3])
    yield make("base-lens", c, base_lens=[1, 2, 5, 1, 3, 1], capacity=64)
    yield make("base-lens-below-one", c, base_lens=[0, -1, INT32_MIN, 1, 1, 0], capacity=48)
    yield make("base-lens-mid-prompt", c, [20, 40, 60], base_lens=[1, 20, 1, 9, 1, 1], draft_lens=[7, 0, 7, 0, 7, 7],
               capacity=80)  # fmt: skip
    yield make("base-lens-above-capacity", c, [20, 40, 60], base_lens=[1, 20, 1, 9, 1, 1], capacity=15)
    yield make("base-lens-saturating", c, [20, INT32_MAX], base_lens=[1, INT32_MAX, 1, INT32_MAX, 1, 1], capacity=20)
    yield make("base-lens-saturating-first", c, base_lens=[INT32_MAX - 3, 1, 1, 1, 1, 1], capacity=20, budget=INT32_MAX)
    yield make("base-lens-padding-rows", c, base_lens=[2, 3, 4, 5, 6, 7], capacity=40, num_reqs=[3])
    for active in (0, 1, 4, 6, 7, -1, INT32_MIN, INT32_MAX):
        yield make(f"num-reqs-{active}", c, num_reqs=[active], min_keep=[1] * 6)
    yield make("num-reqs-zero-count-bonus-off", c, num_reqs=[0], count_bonus=False)


def _tables() -> Iterator[Case]:
    yield make("nine-buckets", _uniform(5, 7, 0.9, 1, seed=9), range(5, 32, 3))
    c = _beta(6, 7, seed=20)
    for buckets in (0, 1, 2, 3, 5, 8, 17, 256):
        budgets = np.linspace(6, 48, buckets).astype(int)
        yield make(f"buckets-{buckets}", c, budgets, np.linspace(5, 12, buckets) ** 1.5)
    rows, steps = np.arange(1, 9)[:, None], np.arange(1, 5)[None]
    budgets, costs = rows * 2 * steps, 5 + rows * steps**1.5
    yield make("table-of-budgets-and-costs", c, budgets, costs, num_reqs=[4])
    yield make("table-of-budgets", c, budgets, costs[5], num_reqs=[4])
    yield make("table-of-costs", c, budgets[5], costs, num_reqs=[4])
    yield make("table-below-the-batch", c, budgets[:3], costs[:3])
    yield make("table-of-one-row", c, budgets[5:6], costs[5:6])
    yield make("table-without-active-rows", c, budgets, costs, num_reqs=[0])
    yield make("table-without-buckets", c, np.zeros((3, 0)), np.zeros((3, 0)))
    for name, cost in {"zero": 0, "negative": -1, "inf": INF, "nan": NAN, "negative-inf": -INF}.items():
        yield make(f"disabled-by-cost-{name}", c, [12, 24, 48], [cost, 1, 100])
        yield make(f"disabled-by-every-cost-{name}", c, [12, 24], [cost, cost])
    yield make("disabled-by-budget", c, [0, -5, 24, INT32_MIN], [0.01, 0.01, 1, 0.01])
    yield make("disabled-by-every-budget", c, [0, -5], [1, 1])
    yield make("disabled-nine-buckets", c, [-1] * 9, [1] * 9)
    yield make("disabled-under-capacity", c, [12, 24], [0, NAN], capacity=20)
    yield make("cost-extremes", c, [12, 24, 48], [3e38, 1e-45, 1e-38])
    yield make("equal-utilities", torch.full((4, 3), 1.0), [16, 8, 4], [16, 8, 4])
    yield make("equal-utilities-not-first", torch.full((4, 3), 1.0), [4, 8, 16], [5, 8, 16])
    yield make("equal-budgets", c, [24, 24, 24], [3, 2, 2])
    yield make("budgets-below-batch", c, [1, 2, 5], [1, 2, 3])
    yield make("budgets-above-everything", c, [49, 1000, INT32_MAX], [5, 4, 3])
    yield make("budgets-not-sorted", c, [40, 10, 48, 6, 22])
    for budget in (0, -1, INT32_MIN, 1, 6, 17, 48, 49, INT32_MAX):
        yield make(f"budget-{budget}", c, [12, 24, 30, 24], budget=budget)
        yield make(f"budget-{budget}-tensor", c, [48, 12, -1], budget=torch.tensor([budget], dtype=torch.int32))
    yield make("budget-among-the-first-of-256", c, range(1, 257), [1] * 256, budget=17)
    yield make("budget-without-buckets", c, [], budget=20)
    yield make("budget-with-disabled-buckets", c, [24, 30], [NAN, 0], budget=20)
    yield make("budget-with-floors", c, [12, 24], budget=0, min_keep=[0, 3, 1, 0, 0, 7])
    yield make("budget-over-capacity", c, [12, 24], budget=30, capacity=20)
    yield make("budget-with-table", c, budgets, costs, budget=20, num_reqs=[3])
    for capacity in (6, 7, 20, 47, 48, 100):
        yield make(f"capacity-{capacity}", c, [6, 20, 48, 200], capacity=capacity)


def _packing() -> Iterator[Case]:
    c = _beta(5, 7, seed=30)
    for block in (1, 16, 17):
        blocks = np.random.default_rng(block).permutation(50)[:20].reshape(5, 4)
        seq = torch.tensor([0, block - 1, 2 * block, 4 * block - 2, 40 * block], dtype=torch.int32)
        yield make(f"block-size-{block}", c, [40], block_table=blocks, block_size=block, seq_lens=seq)
    seq = torch.tensor([-3, 0, 14, 40, 62], dtype=torch.int32)
    negative = [[0, -1, 2, 3], [-1, 0, 1, 2], [3, INT32_MIN, 1, 1], [1, 1, 1, 1], [9, 8, 7, -2]]
    yield make("negative-blocks-and-positions", c, [40], block_table=negative, block_size=16, seq_lens=seq)
    yield make("block-table-without-blocks", c, [40], block_table=np.zeros((5, 0)), block_size=16)
    huge = torch.tensor([0, INT32_MAX - 3, INT32_MAX, 5 * INT32_MAX, 2 * INT32_MAX - 2])
    table = [[INT32_MAX, INT32_MAX - 1]] * 5
    yield make("huge-blocks", c, [40], block_table=table, block_size=INT32_MAX, seq_lens=huge)
    yield make("block-size-without-table", c, [40], block_size=16)
    yield make("block-table-padding-rows", c, [20], block_table=negative, block_size=16, seq_lens=seq, num_reqs=[2])
    yield make("block-table-row-index", c, [20], block_table=[[3, 4]] * 3, block_size=4, row_index=[4, 0, 9],
               seq_lens=torch.tensor([0, 3, 5]))  # fmt: skip
    limits = torch.tensor([2**63 - 3, -(2**63), -1, 2**31 - 2, 2**32])
    yield make("seq-lens-int64-limits", c, [40], seq_lens=limits, block_table=[[1, 2]] * 5, block_size=16)
    limits = torch.tensor([INT32_MAX, INT32_MIN, -1, INT32_MAX - 3, 0], dtype=torch.int32)
    yield make("kv-lens-wrap", c, [40], seq_lens=limits)
    case = make("ids-int64-limits", c, [22], ids=torch.int64, pad_token=-(2**63))
    case.inputs["draft_ids"][:, 0] = 2**63 - 1
    case.inputs["bonus_ids"][:] = -(2**63) + 1
    yield case
    yield make("ids-int64-seq-int64", c, [22], ids=torch.int64, seq_lens=torch.arange(5), pad_token=151_643)
    yield make("pad-token", c, [12, 22], pad_token=-1)
    yield make("pad-token-int32-limit", c, [12, 22], pad_token=INT32_MIN)
    yield make("everything-at-once", _beta(9, 7, seed=31).bfloat16(), [[8, 16, 30], [20, 25, 40], [12, 30, 50]],
               [[5, 6, 9], [6, 7, 9], [0, 7, 11]], ids=torch.int64, row_index=[8, 2, 9, 0, 2, 7],
               draft_lens=[7, 3, 7, 5, 7, 7], min_keep=[1, 0, 2, 9, 0, 0], max_keep=[7, 7, 7, 4, 3, 7],
               weight=[1, 0.7, 1, 1.3, 1, 1], base_lens=[1, 3, 1, 1, 2, 1], num_reqs=[5], capacity=40, pad_token=7,
               block_table=np.arange(30).reshape(6, 5), block_size=16, seq_lens=torch.tensor([3, 70, 31, 9, 15, 1]),
               score="shifted", count_bonus=False)  # fmt: skip


def _shapes() -> Iterator[Case]:
    for draft_len in (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63):
        yield make(f"draft-len-{draft_len}", _beta(3, draft_len, seed=draft_len))
        yield make(f"draft-len-{draft_len}-near-one", _uniform(5, draft_len, 0.95, 1, seed=draft_len))
    for batch in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257):
        yield make(f"batch-{batch}", _beta(batch, 7, seed=batch))
        yield make(f"batch-{batch}-ties", _choice(batch, 5, [1, 0.5, 0.9], seed=batch), weight=[1.0] * batch)
    yield make("batch-0-draft-len-0", torch.zeros(0, 0))
    yield make("batch-0-with-options", torch.zeros(0, 7), [3], num_reqs=[2], budget=5, capacity=4, pad_token=3)
    for batch, draft_len in ((1, 63), (8, 63), (17, 31), (33, 33), (64, 15), (256, 16), (257, 63), (1024, 15)):
        yield make(f"shape-{batch}x{draft_len}", _beta(batch, draft_len, seed=batch))
    yield make("shape-1024x63", _uniform(1024, 63, 0.9, 1), [2000, 30_000])
    yield make("shape-4096x15", _beta(4096, 15), [5000, 20_000])
    yield make("large-all-equal", torch.full((1024, 15), 0.875), [1500, 9000])
    yield make("large-few-values", _choice(4096, 7, [1, 0.5, 0.9], seed=1), [5000, 20_000])
    yield make("large-zeros", torch.zeros(1024, 7), [1500, 5000])
    yield make("large-next-to-one", _uniform(1024, 15, 0.99999, 1, seed=2), [1500, 9000])
    yield make("large-everything", _beta(300, 17, seed=3), [[250, 900, 3000]] * 2, [[9, 12, 40]] * 2,
               row_index=np.random.default_rng(4).integers(-2, 302, 280), draft_lens=np.arange(280) % 19,
               min_keep=np.arange(280) % 3, max_keep=20 - np.arange(280) % 9, weight=np.linspace(0.2, 3, 280),
               base_lens=1 + np.arange(280) % 2, capacity=2500, num_reqs=[261], seq_lens=torch.arange(280),
               block_table=np.arange(280 * 20).reshape(280, 20), block_size=16)  # fmt: skip


def _envelope(budgets: list[int], base: int, slope: int, bend: int = 0) -> np.ndarray:
    """Height and slope of ``base + slope * K + bend * K * (K - 1) / 2`` at each budget K; int64 [R, 2]."""
    k = np.array(budgets)
    return np.stack([base + slope * k + bend * k * (k - 1) // 2, slope + bend * k], -1)


def _policies() -> Iterator[Case]:
    c, few, every = _beta(6, 7, seed=40), [6, 12, 20, 33, 48], list(range(6, 49))
    for name, base, slope, bend in (
        ("rising", 300, 10, 0),
        ("steep", 1, 100, 0),
        ("flat", 100, 0, 0),
        ("bent", 60, 1, 1),
    ):
        for budgets in (few, every):
            yield make(f"early-stop-{name}-{len(budgets)}", c, budgets, [1.0] * len(budgets), policy="early_stop",
                       envelope=_envelope(budgets, base, slope, bend))  # fmt: skip
    stop: dict[str, Any] = {"policy": "early_stop", "envelope": _envelope(few, 300, 10)}
    backward: dict[str, Any] = {"policy": "early_stop", "envelope": _envelope(few[::-1], 300, 10)}
    yield make("early-stop-not-sorted", c, few[::-1], [1.0] * 5, **backward)
    yield make("early-stop-equal-budgets", c, [20, 20, 33, 33], [1.0] * 4, policy="early_stop",
               envelope=[[500, 9], [500, 10], [630, 10], [630, 11]])  # fmt: skip
    yield make("early-stop-shifted", c, few, [1.0] * 5, score="shifted", **stop)
    yield make("early-stop-floors", c, few, [1.0] * 5, min_keep=[2, 2, 2, 0, 0, 7], **stop)
    yield make("early-stop-floors-above-all-but-one", c, few, [1.0] * 5, min_keep=[6] * 6, **stop)
    yield make("early-stop-floors-above-all", c, few[:2], [1.0] * 2, min_keep=[3] * 6, policy="early_stop",
               envelope=_envelope(few[:2], 300, 10))  # fmt: skip
    yield make("early-stop-weights", c, few, [1.0] * 5, weight=[256, 1, 0.3, 2, 1, 2.0**-8], **stop)
    yield make("early-stop-count-bonus-off", c, few, [1.0] * 5, count_bonus=False, **stop)
    yield make("early-stop-capacity", c, few, [1.0] * 5, capacity=15, **stop)
    yield make("early-stop-disabled", c, few, [NAN, 1, 0, 1, 1], **stop)
    yield make("early-stop-all-disabled", c, few, [0.0] * 5, **stop)
    yield make("early-stop-all-equal", torch.full((6, 7), 0.875), few, [1.0] * 5, **stop)
    yield make("early-stop-given-budget", c, few, [1.0] * 5, budget=14, next_budget=[3, 4], **stop)
    yield make("early-stop-base-lens", c, few, [1.0] * 5, base_lens=[1, 5, 1, 2, 1, 1], capacity=60, **stop)
    yield make("early-stop-no-buckets", c, [], [], policy="early_stop", envelope=np.zeros((0, 2)))
    yield make("early-stop-negative", c, few, [1.0] * 5, policy="early_stop", envelope=np.full((5, 2), INT32_MIN))
    yield make("early-stop-limits", torch.ones(6, 7), few, [1.0] * 5, weight=[256] * 6, policy="early_stop",
               envelope=np.full((5, 2), INT32_MAX))  # fmt: skip
    table = np.stack([_envelope(few, 300, slope) for slope in (1, 5, 10, 40)])
    yield make("early-stop-table", c, few, [1.0] * 5, policy="early_stop", envelope=table, num_reqs=[3])
    yield make("early-stop-256", _beta(64, 15), range(64, 832, 3), [1.0] * 256, policy="early_stop",
               envelope=_envelope(list(range(64, 832, 3)), 400, 1, 1))  # fmt: skip
    yield make("early-stop-large", _beta(1024, 15), [1500, 3000, 6000, 9000], [1.0] * 4, policy="early_stop",
               envelope=_envelope([1500, 3000, 6000, 9000], 40_000, 5))  # fmt: skip
    identity = np.tile(np.arange(65) * 2**17, (7, 1))
    worse = identity + 2**18 * np.arange(1, 8)[:, None]
    yield make("calibration-identity", c, calibration=identity)
    yield make("calibration-worse-by-position", c, calibration=worse)
    yield make("calibration-all-alike", c, calibration=np.full((7, 65), 2**19))
    yield make("calibration-one-at-zero", torch.ones(6, 7), calibration=worse)
    yield make("calibration-zero-stays-zero", torch.zeros(6, 7), calibration=np.zeros((7, 65)), weight=[1, 256] * 3)
    yield make("calibration-steep", c, calibration=(np.arange(65) ** 3 * 250)[None].repeat(7, 0))
    yield make("calibration-garbage", c, calibration=_choice(7, 65, [INT32_MIN, -1, 0, 2**20, 2**31 - 128]).int())
    yield make("calibration-shifted", c, calibration=worse, score="shifted")
    yield make("calibration-bfloat16", c.bfloat16(), calibration=worse)
    yield make("calibration-log", c.log(), calibration=worse, log_confidence=True)
    yield make("calibration-rows", c, calibration=worse, row_index=[5, 9, 0, 3], min_keep=[2, 0, 0, 1])
    yield make("calibration-large", _beta(300, 15), calibration=np.tile(np.arange(65) * 2**17, (15, 1)))
    yield make("next-budget", c, next_budget=[0, 0])
    yield make("next-budget-count-wraps", c, next_budget=[0, -1], host_budget=torch.tensor([5]))
    yield make(
        "next-budget-all-disabled", c, [12, 24], [0, 0], next_budget=[7, INT32_MAX], host_budget=torch.tensor([0])
    )
    for batch, buckets in ((6, 4), (6, 40), (300, 4), (1024, 20)):
        spread = np.linspace(batch, 8 * batch, buckets).astype(int)
        yield make(f"history-{batch}-{buckets}", _beta(batch, 7, seed=41), spread, np.linspace(5, 12, buckets),
                   policy="history", score="shifted", budget=3 * batch, next_budget=[1, 2],
                   host_budget=torch.tensor([0]))  # fmt: skip


LISTED = [*_confidences(), *_rows(), *_tables(), *_packing(), *_shapes(), *_policies()]
