"""The planner: what it hands to the operator, what it counts, and when it says not to draft."""

from __future__ import annotations

import json
import math
import re
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
        made.host_budget.fill_((1 << 32) + 40)
    made = planner(policy="history", score="shifted")
    for base_tokens in (20, 33, 21, 25):  # the host reads what the coming step will use
        made.begin(NAMES, base_tokens)
        assert made.read_next().tokens == made.next_budget[0]
        made.select(*TOKENS)
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
    feed(made, certain, DRAFT_LEN, 16)
    assert made.should_draft(BATCH)
    feed(made, hopeless, 0, 400)
    answers = []
    for _ in range(12):
        answers.append(made.should_draft(BATCH))
        if answers[-1]:
            feed(made, hopeless, 0, 1)
    assert answers == ([False] * 4 + [True]) * 2 + [False] * 2
    assert (made.metrics.probes, made.metrics.plain) == (3, 10)  # the first step is a probe too
    feed(made, certain, DRAFT_LEN, 400)
    assert made.should_draft(BATCH)


def test_timed_steps_are_compared_with_their_costs() -> None:
    """Drafted steps take twice what the table says, plain ones half."""
    made = planner()
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.95), DRAFT_LEN, 16)
    seen = made.metrics.plain, made.metrics.probes
    for batch, tokens, cost in ((8, 48, 11.0), (8, 49, 14.0), (1, 8, 5.5), (1, 2, 4.0), (8, 16, 5.0)) * 300:
        if not made.should_draft(8):
            break
        made.timed(batch, tokens, True, 2 * cost)
    assert not made.probing
    for _ in range(10):
        assert not made.should_draft(8)
        made.timed(8, 8, False, 4.0 / 2)
        made.timed(1, 1, False, 3.5 / 2)
    for rows in (8, 5, 1):
        assert list(made.gate.pace(rows).ratios) == [0.25]
    assert list(made.gate.pace(4).ratios) == []
    assert (made.metrics.plain, made.metrics.probes) == (seen[0] + 11, seen[1])
    saved = planner()
    saved.load_state_dict(made.state_dict())
    assert list(saved.gate.pace(8).ratios) == [0.25]
    assert saved.state_dict() == made.state_dict()


def test_steps_without_a_cost_are_not_compared() -> None:
    made = planner()
    made.set_latency(6.0)
    made.timed(8, 17, True, 1.0)  # 16 tokens are left
    unpriced = planner(CostTable((8,), ((5.0, 8.0, 11.0, 14.0),), RATIOS))
    unpriced.timed(8, 8, True, 1.0)
    for untouched in (made, unpriced):
        assert vars(untouched.gate.pace(8)) == vars(planner().gate.pace(8))
    made.timed(8, 16, True, 1.0)
    assert vars(made.gate.pace(8)) != vars(planner().gate.pace(8))


def test_a_step_that_will_not_be_timed_is_not_tried_the_other_way() -> None:
    made = planner()
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.95), DRAFT_LEN, 16)
    for _ in range(1000):
        made.timed(8, 16, True, 5.0)
        assert made.should_draft(8, timeable=False)
    assert not made.should_draft(8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, True, 1.0), "batch: expected 1 to 8 rows (max_batch), got 0"),
        ((9, 9, True, 1.0), "batch: expected 0 to 8 rows (max_batch), got 9"),
        ((8, 7, True, 1.0), "tokens: expected an int from 8 to 2147483647, got 7"),
        ((8, 8, True, 0.0), "milliseconds: expected above 0, finite, got 0.0"),
        ((8, 8, False, math.nan), "milliseconds: expected above 0, finite, got nan"),
        ((8, 8, False, math.inf), "milliseconds: expected above 0, finite, got inf"),
        ((8, 8, False, "1"), "milliseconds: expected a number, got '1'"),
    ],
)
def test_times_that_are_none(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        planner().timed(*arguments)


def test_a_probe_that_is_observed_late_is_one_probe() -> None:
    made = planner(probe_every=5)
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.01), 0, 40)
    assert [made.should_draft(BATCH) for _ in range(20)] == ([False] * 4 + [True]) * 4


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([-1] * BATCH, r"draft_lens: expected 0, or \d \(kept\) to 7 \(draft_len\), got -1"),
        ([8] * BATCH, r"draft_lens: expected 0, or \d \(kept\) to 7 \(draft_len\), got 8"),
        ([1] * BATCH, r"draft_lens: expected 0, or 7 \(kept\) to 7 \(draft_len\), got 1"),
        ([7] * (BATCH - 1), "draft_lens: expected 8 ints"),
    ],
)
def test_drafts_that_cannot_be_are_not_counted(drafts: list[int], message: str) -> None:
    made = planner(policy="history", score="shifted")
    made.begin(NAMES)
    batch = made.select(*TOKENS)  # keeps all
    before = made.state_dict()
    with pytest.raises(ValueError, match=f"^{message}"):
        made.observe(NAMES, batch, drafts, [0] * BATCH)
    with pytest.raises(ValueError, match=r"^requests: expected 8, the rows of the batch, got 7$"):
        made.observe(NAMES[1:], batch, [7] * 7, [0] * 7)
    assert made.state_dict() == before
    made.observe(NAMES, batch, [0] * 3 + [7] * 5, [0] * BATCH)  # three that have ended
    assert (made.metrics.drafts, made.metrics.kept) == (35, 35)


def test_what_is_no_step_is_named() -> None:
    made = planner()
    for at, name in enumerate(("confidence", "draft_ids", "bonus_ids")):
        expected = "one value a row" if name == "bonus_ids" else "a tensor"
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}, got NoneType$"):
            made.select(*TOKENS[:at], None, *TOKENS[at + 1 :])  # type: ignore[arg-type]
    for name, wrong, expected in (
        ("capacity", 4.0, "an int from 1 to 2147483647, got 4.0"),
        ("capacity", 0, "an int from 1 to 2147483647, got 0"),
        ("tables", 3, "what tables returned, got int"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected {expected}$"):
            made.select(*TOKENS, **{name: wrong})  # type: ignore[arg-type]
    made.begin(NAMES)
    step, lens, none = made.select(*TOKENS), [DRAFT_LEN] * BATCH, [0] * BATCH
    before = made.state_dict()
    calls: list[tuple[tuple[Any, ...], str]] = [
        ((None, step, lens, none), "requests: expected one value a row, got NoneType"),
        ((NAMES, None, lens, none), "batch: expected what select returned, got NoneType"),
        ((NAMES, step, None, none), "draft_lens: expected 8 ints, got None"),
        ((NAMES, step, 7, none), "draft_lens: expected 8 ints, got 7"),
        ((NAMES, step, torch.tensor(7), none), "draft_lens: expected 8 ints, got 7"),
        ((NAMES, step, lens, None), "accepted: expected 8 ints, got None"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=f"^{message}$"):
            made.observe(*call)
    assert made.state_dict() == before
    made.observe(NAMES, step, iter(lens), none)  # type: ignore[arg-type]


@pytest.mark.parametrize("active", [1, 3, 7])
def test_padding_rows_of_a_captured_step_are_not_observed(active: int) -> None:
    captured, alone = planner(), planner()
    captured.begin(NAMES[:active])
    batch = captured.select(*TOKENS, num_reqs=torch.tensor([active], dtype=torch.int32))
    captured.observe(NAMES[:active], batch, [DRAFT_LEN] * active, [0] * active)
    alone.begin(NAMES[:active])
    batch = alone.select(*(tokens[:active] for tokens in TOKENS))
    alone.observe(NAMES[:active], batch, [DRAFT_LEN] * active, [0] * active)
    assert captured.state_dict() == alone.state_dict()
    assert captured.metrics.tokens == active


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
    with pytest.raises(ValueError, match=r"state: expected rule TokenCounts.* got PaperRatios"):
        planner(CostTable((8,), ((1.0, 2.0),), TokenCounts((8, 64)))).load_state_dict(made.state_dict())


def test_another_backend() -> None:
    made = planner(backend=backends.get("reference"))
    made.begin(NAMES)
    assert_same(made.select(*TOKENS), select_and_pack(*TOKENS, *TABLE.dense(BATCH)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fixed"}, "policy: expected one of argmax, early_stop, history, got 'fixed'"),
        ({"floor": -1}, "floor: expected an int from 0 to 2147483647, got -1"),
        ({"floor_every": 1.5}, "floor_every: expected an int from 0 to 2147483647, got 1.5"),
        ({"probe_every": 0}, "probe_every: expected an int from 1 to 2147483647, got 0"),
        ({"min_gain": math.nan}, "min_gain: expected 0 or more, got nan"),
        ({"capacity": 0}, "capacity: expected an int from 1 to 2147483647, got 0"),
        ({"authority": "rank1"}, "authority: expected 'all' or 'rank0', got 'rank1'"),
        ({"agree": True, "authority": "rank0"}, "agree: expected False with authority='rank0', got True"),
        ({"agree": True}, "agree: expected False with policy 'argmax', got True"),
        ({"latency_ms": math.nan}, "latency_ms: expected milliseconds or None, got nan"),
        ({"latency_ms": "5"}, "latency_ms: expected a number, got '5'"),
        ({"backend": "cpu"}, "backend: expected a Backend of backends.get, got 'cpu'"),
        ({"ids": torch.int16}, "ids: expected torch.int32 or torch.int64, got torch.int16"),
        ({"ids": "int64"}, "ids: expected torch.int32 or torch.int64, got int64"),
        ({"calibration": 1.0}, "calibration: expected an object with a method table, got 1.0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        planner(**options)


@pytest.mark.parametrize("priority", ["x", None, True, math.nan, -1.5, 0])
def test_a_priority_is_a_number_above_0(priority: Any) -> None:
    above = "" if priority in ("x", None, True) else " above 0"
    for made in (planner(priorities=True), planner()):
        with pytest.raises(ValueError, match=f"^priority: expected a number{above}, got {priority!r}$"):
            made.join("new", priority)
        made.join("new")  # it has not joined yet


def test_tables_and_rows_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"^table: expected buckets for 5 drafts \(draft_len\), got 7$"):
        Planner(TABLE, BATCH, 5)
    with pytest.raises(ValueError, match=r"^table: expected a CostTable, got NoneType$"):
        Planner(None, BATCH, 5)  # type: ignore[arg-type]
    made = planner()
    more = [torch.cat([t, t[:1]]) for t in TOKENS]
    calls = (made.begin, range(9), "requests"), (lambda rows: made.select(*rows), more, "bonus_ids")
    for call, value, name in (*calls, (made.should_draft, 9, "batch")):
        with pytest.raises(ValueError, match=rf"^{name}: expected 0 to 8 rows \(max_batch\), got 9$"):
            call(value)  # type: ignore[operator]
    for wrong in (2.5, "3", None, -1):
        with pytest.raises(ValueError, match=rf"^batch: expected 0 to 8 rows \(max_batch\), got {wrong}$"):
            made.should_draft(wrong)  # type: ignore[arg-type]
    for nothing, kind in (
        (None, "NoneType"),
        (7, "int"),
        (iter(NAMES), "range_iterator|list_iterator"),
        (torch.tensor(1), "Tensor"),
    ):
        with pytest.raises(ValueError, match=rf"^requests: expected one value a row, got ({kind})$"):
            made.begin(nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^confidence: expected 7 columns \(draft_len\), got 3$"):
        made.select(TOKENS[0][:, :3].contiguous(), TOKENS[1][:, :3].contiguous(), *TOKENS[2:])


def test_ids_are_of_the_planners_dtype() -> None:
    wrong = [TOKENS[0], *(tokens.long() for tokens in TOKENS[1:3]), TOKENS[3]]
    with pytest.raises(ValueError, match=r"^draft_ids: expected torch.int32 \(ids of the planner\), got torch.int64$"):
        planner().select(*wrong)


@pytest.mark.parametrize("base_tokens", [-1, 2.5, "x", True])
def test_base_tokens_are_a_number(base_tokens: Any) -> None:
    made = planner(policy="history", score="shifted")
    before = made.state_dict()
    with pytest.raises(ValueError, match=rf"^base_tokens: expected an int from 0 to \d+, got {base_tokens!r}$"):
        made.begin(NAMES, base_tokens)
    assert made.state_dict() == before


@pytest.mark.parametrize("name", ["min_keep", "weight", "budget", "calibration", "policy"])
def test_what_the_planner_sets_is_left_to_it(name: str) -> None:
    made = planner(floor_every=2, priorities=True)
    with pytest.raises(ValueError, match=f"^{name}: expected to be left to the planner, got a value$"):
        made.select(*TOKENS, **{name: torch.ones(BATCH)})
    assert planner().select(*TOKENS, min_keep=torch.full((BATCH,), 7, dtype=torch.int32)).keep_lens.tolist() == [7] * 8


def test_observations_are_checked_before_they_count() -> None:
    made = planner()
    made.begin(NAMES)
    batch = made.select(*TOKENS)
    before, kept = made.state_dict(), batch.keep_lens.tolist()
    for draft_lens, accepted, message in (
        ([7] * BATCH, [100] * BATCH, f"accepted: expected 0 to {kept[0]}, the drafts kept of its row, got 100"),
        ([7] * BATCH, [-1] * BATCH, f"accepted: expected 0 to {kept[0]}, the drafts kept of its row, got -1"),
        ([7] * BATCH, [0.5] * BATCH, f"accepted: expected 8 ints, got {[0.5] * BATCH}"),
        ([7] * 3, [0] * BATCH, "draft_lens: expected 8 ints, got [7, 7, 7]"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            made.observe(NAMES, batch, draft_lens, accepted)
    assert made.state_dict() == before
    made.observe(NAMES, batch, torch.full((BATCH,), 7), torch.zeros(BATCH, dtype=torch.int64))
    assert json.dumps(made.state_dict()["metrics"]["steps"]) == "1"


def test_a_late_observation_knows_the_tables_of_its_step() -> None:
    late, now = planner(), planner()
    for made in (late, now):
        made.begin(NAMES)
        first = made.select(*TOKENS)
        if made is now:
            made.observe(NAMES, first, [7] * BATCH, [0] * BATCH)
        made.begin(NAMES[:3], 50)
        few, base_lens = [t[:3] for t in TOKENS], torch.tensor([48, 1, 1]).int()
        second = made.select(*few, tables=made.tables(3, 50), base_lens=base_lens, capacity=80)
        if made is late:
            made.observe(NAMES, first, [7] * BATCH, [0] * BATCH)
            made.begin(NAMES[:2])
            made.select(*[t[:2] for t in TOKENS])
        made.observe(NAMES[:3], second, [7] * 3, [0] * 3)
    assert late.metrics == now.metrics
    assert late.gate.state() == now.gate.state()
    assert late.gate.expectation.judged == 8 + 3  # each by the promise of its own bucket


def test_a_latency_budget_reaches_the_decision_to_draft() -> None:
    made = planner(CostTable((8,), ((5.0, 30.0, 31.0, 6.0),), RATIOS, plain_ms=(2.0,)))
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.95), 4, 16)
    assert made.should_draft(BATCH)
    made.set_latency(5.5)
    assert not made.should_draft(BATCH)
    made.set_latency(None)
    assert made.should_draft(BATCH)


def test_floors_do_not_keep_the_gate_from_learning() -> None:
    cheap = CostTable((8,), ((5.0, 50.0, 60.0, 70.0),), RATIOS, plain_ms=(4.0,))
    made = planner(cheap, floor=7, floor_every=1)
    feed(made, torch.full((BATCH, DRAFT_LEN), 0.01), 0, 16)
    assert made.gate.expectation.curve != []
    assert made.gate.expectation.judged == 0  # no bucket says what so many tokens promise
    assert not made.should_draft(BATCH)


def test_states_are_copies_and_belong_to_their_buckets() -> None:
    made, state = planner(policy="history"), None
    for _ in range(2):
        run(made)
    state, saved = made.state_dict(), json.dumps(made.state_dict()["metrics"]["buckets"])
    first, second = planner(policy="history"), planner(policy="history")
    for restored in (first, second):
        restored.load_state_dict(state)
    run(first)
    assert second.state_dict() == state
    assert json.dumps(state["metrics"]["buckets"]) == saved
    assert second.read_next() == made.read_next()
    for restored in (made, second):
        restored.begin(NAMES[:4], 20)
    assert made.read_next() == second.read_next()
    assert second.next_budget.tolist() == made.next_budget.tolist()
    with pytest.raises(ValueError, match=r"^state: expected draft_len 3, got 7$"):
        Planner(CostTable((8,), ((1.0,),), TokenCounts((64,))), BATCH, 3).load_state_dict(
            state | {"rule": "TokenCounts(counts=(64,))"}
        )


@pytest.mark.parametrize("name", ["steps", "gate", "metrics", "carried", "priority", "calibration"])
def test_states_that_are_none(name: str) -> None:
    made = planner()
    run(made)
    state, before = made.state_dict(), planner().state_dict()
    for wrong in ({key: value for key, value in state.items() if key != name}, state | {name: {}}, state | {name: "x"}):
        other = planner()
        if name in wrong and name in ("priority", "calibration") and wrong[name] == {}:
            continue  # as of one without
        with pytest.raises(ValueError, match=r"^state: expected"):
            other.load_state_dict(wrong)
        assert other.state_dict() == before
    for carried in (
        {"next_budget": [-1, 0]},
        {"next_budget": [5, "x"]},
        {"next_budget": [1]},
        {"base": "x"},
        {"base": -1},
    ):
        other = planner(calibration=PositionRates(DRAFT_LEN))
        before = other.state_dict()
        with pytest.raises(ValueError, match=r"^state: expected what state_dict returned"):
            other.load_state_dict(before | {"carried": before["carried"] | carried})
        assert other.state_dict() == before
    with pytest.raises(ValueError, match=r"^state: expected what state_dict returned, got NoneType$"):
        planner().load_state_dict(None)  # type: ignore[arg-type]
    weighted = planner(priorities=True)
    weighted.join("more", 2.0)
    with pytest.raises(ValueError, match=r"^priority: expected 1 in a planner without priorities=True, got 2.0$"):
        planner().load_state_dict(weighted.state_dict())


def test_the_fit_of_another_calibration_is_refused() -> None:
    state = planner(calibration=OnlineLogistic(DRAFT_LEN)).state_dict()
    made = planner(calibration=PositionRates(DRAFT_LEN))
    run(made)
    before = made.state_dict()
    with pytest.raises(ValueError, match=r"^state: expected what state_dict returned, got another one: KeyError"):
        made.load_state_dict(state)
    assert made.state_dict() == before


def test_the_fit_of_a_calibration_is_saved() -> None:
    rates = PositionRates(DRAFT_LEN)
    made = planner(calibration=rates)
    rates.update(torch.full((BATCH,), 7), torch.zeros(BATCH, dtype=torch.int64))
    fresh = PositionRates(DRAFT_LEN)
    other = planner(calibration=fresh)
    other.load_state_dict(made.state_dict())
    assert torch.equal(fresh.table(), rates.table())
    assert torch.equal(other._curves, rates.table())  # type: ignore[arg-type]


def test_captured_sizes_are_carried_as_they_are() -> None:
    made = planner(CostTable((8,), ((5.0, 6.0, 8.0, 30.0),), TokenCounts((8, 16, 32, 64))), policy="history")
    run(made)
    budget = made.read_next().tokens
    for base_tokens in (3, 40):
        made.begin(NAMES, base_tokens)
        assert made.read_next().tokens == int(made.next_budget[0]) == budget
