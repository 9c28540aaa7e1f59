"""The planner: what it hands to the operator, what it counts, and when it says not to draft."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dcut_kernels import backends, select_and_pack
from dcut_kernels.calibration import OnlineLogistic, PositionRates
from dcut_kernels.cost import CostTable, PaperRatios, TokenCounts
from dcut_kernels.planner import Planner
from microbench.cases import bench_case
from python_tests.compare import assert_same

BATCH, DRAFT_LEN = 8, 7
RATIOS = PaperRatios((0.25, 0.5, 0.75, 1.0), DRAFT_LEN)
TABLE = CostTable((1, 8), ((4.0, 4.5, 5.0, 5.5), (5.0, 8.0, 11.0, 14.0)), RATIOS, plain_ms=(3.5, 4.0))
CASE = bench_case(BATCH, DRAFT_LEN).inputs
TOKENS = [CASE[name] for name in ("confidence", "draft_ids", "bonus_ids", "seq_lens")]
NAMES = list(range(BATCH))


def planner(table: CostTable = TABLE, **options: Any) -> Planner:
    made = Planner(table, BATCH, DRAFT_LEN, **{"ids": torch.int32} | options)
    for name in NAMES:
        made.join(name)
    return made


def run(made: Planner, accepted: int = 2) -> list[int]:
    """One step in which the target accepts so many drafts of each row; returns what was kept."""
    made.begin(NAMES)
    batch = made.select(*TOKENS)
    kept = batch.keep_lens.tolist()
    made.observe(NAMES, batch, [DRAFT_LEN] * BATCH, [min(n, accepted) for n in kept])
    return kept


def test_a_step_is_that_of_the_operator() -> None:
    budgets, costs = TABLE.dense(BATCH)
    for policy in ("argmax", "early_stop"):
        options = {"envelope": TABLE.envelope(BATCH)} if policy == "early_stop" else {}
        made = planner(policy=policy, score="shifted")
        made.begin(NAMES)
        expected = select_and_pack(*TOKENS, budgets, costs, policy=policy, score="shifted", **options)
        assert_same(made.select(*TOKENS), expected)


def test_buffers_are_reused() -> None:
    made = planner()
    made.begin(NAMES)
    first = made.select(*TOKENS)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(first, made.select(*TOKENS), strict=True))
    few = [t[:3] for t in TOKENS]
    assert made.select(*few).keep_lens.shape == (3,)


def test_biased_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="combination: expected one that keeps the target's distribution"):
        planner(draft_sampling="sampled", score="shifted")
    planner(draft_sampling="sampled", score="shifted", policy="history")
    planner(draft_sampling="sampled", score="shifted", allow_biased=True)


def test_history_carries_the_budget() -> None:
    made = planner(policy="history", score="shifted")
    budgets, costs = TABLE.dense(BATCH)
    assert made.read_next() == (0, 2**31 - 1)
    assert run(made) == [DRAFT_LEN] * BATCH  # nothing is known yet
    best = int(select_and_pack(*TOKENS, budgets, costs, score="shifted").decision[0])
    for count in (1, 2, 3):
        assert made.read_next() == (count, budgets[-1, best])
        assert sum(run(made)) + BATCH == budgets[-1, best]
    assert made.metrics.buckets[best] == 3


def test_the_carried_budget_grows_and_shrinks_with_prompts() -> None:
    made = planner(policy="history", score="shifted")
    made.begin(NAMES, 20)
    made.select(*TOKENS)
    budget, before = made.read_next().tokens, 20
    assert 12 < budget < 2**31 - 1
    for base_tokens in (200, BATCH, 100, 0, 5):
        made.begin(NAMES, base_tokens)
        budget, before = max(0, budget + base_tokens - before), base_tokens
        assert made.next_budget.tolist() == [budget, 1]
        made.next_budget[0] = budget = 40
    fresh = planner(policy="history", score="shifted")
    for base_tokens in (3, 5):
        fresh.begin(NAMES, base_tokens)
    assert fresh.next_budget.tolist() == [2**31 - 1, 0]  # everything, still


def feed(made: Planner, confidence: torch.Tensor, accepted: int, steps: int) -> None:
    """Steps with these confidences, in which the target accepts so many drafts of each row."""
    for _ in range(steps):
        made.begin(NAMES)
        batch = made.select(confidence, *TOKENS[1:])
        kept = batch.keep_lens.tolist()
        made.observe(NAMES, batch, [DRAFT_LEN] * BATCH, [min(n, accepted) for n in kept])


def test_floors_end_starvation() -> None:
    confidence = torch.full((BATCH, DRAFT_LEN), 0.01)
    confidence[0] = confidence[1, 0] = 1.0  # take all of the smallest bucket
    made, never = planner(floor=1, floor_every=4), planner()
    feed(made, confidence, 0, 12)
    feed(never, confidence, 0, 12)
    last = made.metrics.requests[BATCH - 1]
    assert (last.kept, last.longest_without) == (3, 3)
    assert never.metrics.requests[BATCH - 1].longest_without == 12
    assert never.metrics.requests[0].longest_without == 0


def test_priorities_are_weights_by_request() -> None:
    made = Planner(TABLE, BATCH, DRAFT_LEN, ids=torch.int32, priorities=True)
    weights = [1.0, 4.0, 0.25, 1.0, 1.0, 1.0, 1.0, 2.0]
    for name, weight in zip(NAMES, weights, strict=True):
        made.join(name, weight)
    order = NAMES[::-1]
    made.begin(order)
    expected = select_and_pack(*TOKENS, *TABLE.dense(BATCH), weight=torch.tensor(weights[::-1]))
    assert_same(made.select(*TOKENS), expected)
    for name in NAMES:
        made.leave(name)
        made.join(name)
    made.begin(order)
    assert_same(made.select(*TOKENS), select_and_pack(*TOKENS, *TABLE.dense(BATCH)))
    with pytest.raises(ValueError, match=r"priority: expected 1 in a planner without priorities=True, got 2\.0"):
        planner().join("new", 2.0)


def test_a_latency_budget_disables_what_takes_longer() -> None:
    certain = [torch.ones(BATCH, DRAFT_LEN), *TOKENS[1:]]
    made = planner()
    for limit, bucket in ((None, 3), (11.5, 2), (11.0, 2), (8.0, 1), (0.1, 0)):
        made.set_latency(limit)
        made.begin(NAMES)
        assert made.select(*certain).decision[0] == bucket, limit
    disabled = CostTable((8,), ((math.inf, 8.0, 0.0, 14.0),), RATIOS)
    made = planner(disabled, latency_ms=1.0)
    made.begin(NAMES)
    assert made.select(*certain).decision[0] == 1


def test_what_is_counted() -> None:
    made = planner()
    kept = run(made, accepted=2)
    run(made, accepted=2)
    metrics = made.metrics
    assert metrics.steps == 2
    assert sum(metrics.buckets) == 2
    assert (metrics.drafts, metrics.kept) == (2 * BATCH * DRAFT_LEN, 2 * sum(kept))
    assert metrics.pruned == metrics.drafts - metrics.kept
    assert metrics.accepted == 2 * sum(min(n, 2) for n in kept)
    assert metrics.tokens == metrics.accepted + 2 * BATCH
    budgets, costs = TABLE.dense(BATCH)
    step = select_and_pack(*TOKENS, budgets, costs)
    assert metrics.expected == pytest.approx(2 * float(step.gains[step.decision[0]]) / 2**30)
    stats = made.leave(3)
    assert (stats.drafts, stats.kept, stats.kept_share) == (14, 2 * kept[3], kept[3] / 7)
    with pytest.raises(ValueError, match="request: expected one that has joined, got 3"):
        made.leave(3)
    with pytest.raises(ValueError, match="request: expected one that has not joined, got 2"):
        made.join(2)


def test_no_drafting_where_plain_decoding_wins() -> None:
    """Acceptance falls, and drafting stops but for a probe every few steps; it rises, and drafting goes on."""
    made = planner(probe_every=5)
    certain, hopeless = (torch.full((BATCH, DRAFT_LEN), c) for c in (0.95, 0.01))
    assert made.should_draft(BATCH)
    feed(made, certain, DRAFT_LEN, 3)
    assert made.should_draft(BATCH)
    feed(made, hopeless, 0, 400)
    answers = []
    for _ in range(12):
        answers.append(made.should_draft(BATCH))
        if answers[-1]:
            feed(made, hopeless, 0, 1)
    assert answers == ([False] * 4 + [True]) * 2 + [False] * 2
    assert (made.metrics.probes, made.metrics.plain) == (2, 10)
    feed(made, certain, DRAFT_LEN, 400)
    assert made.should_draft(BATCH)


def test_promises_that_are_not_kept_count_less() -> None:
    """Scores say that drafting pays, the target accepts nothing."""
    made = planner()
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.95), 0, 400)
    assert not made.should_draft(BATCH)


def test_drafting_without_a_price_of_plain_decoding() -> None:
    made = planner(CostTable((8,), ((5.0, 8.0, 11.0, 14.0),), RATIOS))
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.01), 0, 50)
    assert made.should_draft(BATCH)
    assert made.should_draft(0)


def test_calibration_is_applied_and_taken_over_when_asked() -> None:
    rates = PositionRates(DRAFT_LEN)
    made = planner(calibration=rates)
    sure = [torch.ones(BATCH, DRAFT_LEN), *TOKENS[1:]]
    budgets, costs = TABLE.dense(BATCH)
    made.begin(NAMES)
    before = made.select(*sure).gains.clone()
    assert torch.equal(before, select_and_pack(*sure, budgets, costs, calibration=rates.table()).gains)
    for _ in range(50):
        rates.update(torch.full((BATCH,), 7), torch.zeros(BATCH, dtype=torch.int64))
    assert torch.equal(made.select(*sure).gains, before)
    made.calibrate()
    assert (made.select(*sure).gains < before).all()
    with pytest.raises(ValueError, match="calibration: expected a Calibration, got None"):
        planner().calibrate()


def test_saved_and_restored() -> None:
    made = planner(policy="history", score="shifted", calibration=OnlineLogistic(DRAFT_LEN))
    for _ in range(3):
        run(made)
    other = Planner(TABLE, BATCH, DRAFT_LEN, policy="history", score="shifted", ids=torch.int32,
                    calibration=OnlineLogistic(DRAFT_LEN))  # fmt: skip
    other.load_state_dict(made.state_dict())
    assert other.metrics == made.metrics
    assert other.gate.state() == made.gate.state()
    assert run(other) == run(made)
    with pytest.raises(ValueError, match="state: expected 2 buckets, got 4"):
        planner(CostTable((8,), ((1.0, 2.0),), TokenCounts((8, 64)))).load_state_dict(made.state_dict())


def test_another_backend() -> None:
    made = planner(backend=backends.get("reference"))
    made.begin(NAMES)
    assert_same(made.select(*TOKENS), select_and_pack(*TOKENS, *TABLE.dense(BATCH)))
