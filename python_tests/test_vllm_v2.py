"""vLLM's V2 runner: the manager's decisions, with stand-ins for streams, events and ranks."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from vllm import __version__
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

from dcut_kernels.cost import CostTable, TokenCounts
from dcut_kernels.integration.vllm import v2
from dcut_kernels.integration.vllm.costs import cost_table
from dcut_kernels.integration.vllm.options import difference

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm_signatures.json").read_text())
VERSION = ".".join(__version__.split(".")[:2])
DRAFTS, REQUESTS = 7, 24
CAPTURED = {1: 2.0, 2: 2.1, 4: 2.2, 8: 2.5, 16: 2.9, 24: 3.6, 32: 4.1, 48: 5.4, 64: 6.0, 96: 8.5}
ABOVE = {144: 21.0, 192: 24.5, 384: 41.0, 512: 52.0}
DRAFTER = [(1, 0.5), (8, 0.75), (16, 1.25)]
VERIFY = [*CAPTURED.items(), *ABOVE.items()]
ON = {"dcut": True}
METHODS = ("set_cost_curves", "get_num_tokens", "reallocate_drafts")
Draft = tuple[Fraction, int, int]  # minus its score, its position, its row: drafts in the order in which they are kept


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """vLLM as it was imported, on a machine without a GPU; collects what is logged."""
    lines: list[str] = []
    monkeypatch.setattr(v2.logger, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(adaptive, "stream", lambda new, current: nullcontext())
    monkeypatch.setattr(adaptive, "gpu_sync_allowed", nullcontext)
    monkeypatch.setattr(adaptive, "get_tp_group", lambda: SimpleNamespace(broadcast_object=lambda value, src: value))
    monkeypatch.setattr(adaptive, v2.RANK, adaptive._assign_draft_token_budget)
    monkeypatch.setattr(adaptive, v2.FACTORY, inspect.unwrap(getattr(adaptive, v2.FACTORY)))
    return lines


class Runner:
    """What the runner does with its manager, with made-up requests."""

    def __init__(self, config: Any = ON, most_logits: int = 10**6) -> None:
        self.rng = random.Random(0)
        self.states = SimpleNamespace(
            num_speculative_steps=DRAFTS, max_num_reqs=REQUESTS, max_num_batched_tokens=512,
            device=torch.device("cpu"), req_id_to_index={}, num_computed_tokens_np=np.zeros(REQUESTS, np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(REQUESTS, np.int32)),
        )  # fmt: skip
        self.manager: Any = getattr(adaptive, v2.FACTORY)(
            enable_adaptive_verification=True, attn_groups=[], req_states=self.states, num_bonus_tokens=1,
            query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32), max_total_logits=most_logits,
            vllm_config=SimpleNamespace(additional_config=config),
        )  # fmt: skip

    def measure(self) -> None:
        assert {batch["num_tokens"] for batch in self.manager.batches_to_profile([*CAPTURED])} >= {*CAPTURED}
        self.manager.set_cost_curves(DRAFTER, VERIFY)
        self.decider = self.manager.get_num_tokens.__self__

    def arrive(self) -> None:
        """Requests with drafts in front, then those that end their prompt in this step, and those that do not."""
        rng, slots = self.rng, self.rng.sample(range(REQUESTS), self.rng.randint(1, REQUESTS))
        rows, drafting = len(slots), rng.randint(1, len(slots))
        self.names = [f"request {slot}" for slot in slots]
        self.states.req_id_to_index = dict(zip(self.names, slots, strict=True))
        self.idx_mapping = torch.tensor(slots)
        self.drafts = [rng.randint(1, DRAFTS) if row < drafting else 0 for row in range(rows)]
        self.base = [1 if row < drafting else rng.randint(1, 9) for row in range(rows)]
        self.sampling = [row < drafting or rng.random() < 0.5 for row in range(rows)]
        for slot, base, sampling in zip(slots, self.base, self.sampling, strict=True):
            self.states.num_computed_tokens_np[slot] = 10
            self.states.prefill_len.np[slot] = 10 + base + (0 if sampling else 1)

    def record(self, make: Callable[[int, int], torch.Tensor], *seeds: int) -> torch.Tensor:
        """Confidences of steps before this one, the last of which the device has."""
        batch = SimpleNamespace(num_reqs=len(self.names), idx_mapping=self.idx_mapping)
        for seed in seeds:
            confidences = make(batch.num_reqs, seed)
            self.manager.record_confidences(confidences, batch)
        return confidences

    def count(self, decide: Any = None) -> int:
        """Tokens of the step, of requests that the scheduler lists in another order."""
        order = sorted(range(len(self.names)), key=lambda row: self.names[row])
        tokens = {self.names[row]: self.base[row] + self.drafts[row] for row in order}
        drafts = {self.names[row]: [5] * self.drafts[row] for row in order if self.drafts[row]}
        return (decide or self.manager.get_num_tokens)(tokens, drafts)

    def admitted(self) -> list[int]:
        """Drafts that each row keeps, and what the runner gets with them."""
        scheduled = np.array(self.base) + np.array(self.drafts)
        self.manager.compact_batch(np.array(self.drafts), scheduled, np.zeros(len(scheduled) + 1, np.int32))
        cu_num_logits, query_start_loc, budget, *_ = self.manager.reallocate_drafts(self.names, self.idx_mapping)
        keep = (cu_num_logits.diff() - 1).tolist()
        ends = [*accumulate((base + n for base, n in zip(self.base, keep, strict=True)), initial=0)]
        assert query_start_loc.tolist() == ends + ends[-1:] * (REQUESTS - len(keep))
        assert sum(keep) == budget
        assert self.manager._batch_budget is None
        return keep

    def ranked(self, confidences: np.ndarray) -> list[Draft]:
        """All drafts of confidences [B, D], best first, in exact arithmetic."""
        found = []
        for row, (values, drafts) in enumerate(zip(confidences.tolist(), self.drafts, strict=True)):
            score = Fraction(1)
            for position in range(drafts):
                score *= Fraction(values[position])
                found.append((-score, position, row))
        return sorted(found)


def lengths(best: Sequence[Draft], rows: int) -> list[int]:
    return [sum(draft[2] == row for draft in best) for row in range(rows)]


def started(config: Any = ON, most_logits: int = 10**6) -> Runner:
    v2.install()
    runner = Runner(config, most_logits)
    assert not set(vars(runner.manager)) & {*METHODS[1:]}  # no decision without costs
    runner.measure()
    runner.arrive()
    return runner


def uniform(rows: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, DRAFTS, generator=torch.Generator().manual_seed(seed)) ** 0.5


def dyadic(rows: int, seed: int) -> torch.Tensor:
    """Confidences whose products are exact, so that many tie, sometimes all."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 ** torch.randint(0, 3 if seed % 4 else 1, (rows, DRAFTS), generator=generator).float()


def test_installed_signatures() -> None:
    if VERSION not in RECORDED:
        pytest.skip(f"no signatures of vllm {VERSION} are recorded")
    for name, expected in RECORDED[VERSION]["parameters"].items():
        parameters = inspect.signature(attrgetter(name)(adaptive)).parameters.values()
        got = [p.name + ("" if p.default is p.empty else "=") for p in parameters if p.name != "self"]
        assert got == expected, name
    runner = started(config={})
    runner.count()
    returned = runner.manager.reallocate_drafts(runner.names, runner.idx_mapping)
    assert len(returned) == RECORDED[VERSION]["reallocate_drafts returns"]


def recorded(version: str, changes: dict[str, list[str] | None]) -> SimpleNamespace:
    """A module with the signatures of a version of vLLM, but for some."""
    module = SimpleNamespace(AdaptiveVerificationManager=SimpleNamespace())
    for name, parameters in (RECORDED[version]["parameters"] | changes).items():
        if parameters is not None:
            owner, _, method = name.rpartition(".")
            taken = ", ".join(p.replace("=", "=None") for p in (["self"] if owner else []) + parameters)
            function = eval(f"lambda {taken}: None")
            function.__qualname__ = name
            setattr(module.AdaptiveVerificationManager if owner else module, method, function)
    return module


@pytest.mark.parametrize("version", RECORDED)
def test_recorded_signatures_are_accepted(version: str) -> None:
    assert difference(recorded(version, {}), v2.FUNCTIONS) is None
    for name, text in v2.FUNCTIONS.items():
        parameters, exact = text.removeprefix("...").split(), not text.startswith("...")
        for other in (None, parameters[:-1], [*parameters[:-1], "other"]):
            assert (difference(recorded(version, {name: other}), v2.FUNCTIONS) or "").startswith(name), (name, other)
        for more in (["more", *parameters], [*parameters, "further="]):
            assert (difference(recorded(version, {name: more}), v2.FUNCTIONS) is None) == (not exact), name


def test_a_changed_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    factory = getattr(adaptive, v2.FACTORY)
    monkeypatch.setattr(adaptive.AdaptiveVerificationManager, "get_num_tokens", lambda self, batch: 0)
    v2.install()
    assert getattr(adaptive, v2.FACTORY) is factory
    assert len(warnings) == 1
    assert "expected parameters num_tokens_per_req draft_tokens, got batch" in warnings[0]


def test_installing_twice_is_installing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, before = SimpleNamespace(), getattr(adaptive, v2.FACTORY)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", runner)
    v2.install()
    once = getattr(adaptive, v2.FACTORY)
    v2.install()
    assert once is getattr(adaptive, v2.FACTORY) is getattr(runner, v2.FACTORY)
    assert once.__wrapped__ is before


@pytest.mark.parametrize("config", [{}, {"dcut": False}, None])
def test_switched_off(config: Any, warnings: list[str]) -> None:
    assert not set(vars(started(config).manager)) & {*METHODS}
    assert warnings == []


def test_switched_on_without_a_manager(warnings: list[str]) -> None:
    v2.install()
    taken = inspect.signature(getattr(adaptive, v2.FACTORY)).parameters
    arguments = dict.fromkeys(taken) | {"vllm_config": SimpleNamespace(additional_config=ON)}
    assert getattr(adaptive, v2.FACTORY)(**arguments) is None
    assert len(warnings) == 1


def test_another_stash_is_left_alone(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """A manager that keeps more between its methods than is known decides by itself."""

    def get_num_tokens(self: Any, num_tokens_per_req: Any, draft_tokens: Any) -> int:
        self._batch_budget = {}, {}, 0, {}
        return 0

    monkeypatch.setattr(adaptive.AdaptiveVerificationManager, "get_num_tokens", get_num_tokens)
    manager = started().manager
    assert set(vars(manager)) & {*METHODS} == {"set_cost_curves"}
    assert manager._batch_budget is None
    assert len(warnings) == 1


def test_admits_what_vllm_admits() -> None:
    """Where the last draft that is kept and the first that is not differ by more than the number format."""
    runner, same = started(), 0
    for seed in range(150):
        runner.arrive()
        order = runner.ranked(runner.record(uniform, seed, seed + 1000).numpy())
        kept = runner.count() - sum(runner.base)
        theirs, rank = torch.tensor(runner.drafts, dtype=torch.int32), getattr(adaptive, v2.RANK)
        rank(runner.manager._confidence_probs, runner.idx_mapping, theirs, kept, DRAFTS)
        admitted = runner.admitted()
        assert sum(admitted) == kept
        last, following = (-order[i][0] if 0 < kept < len(order) else 0 for i in (kept - 1, min(kept, len(order) - 1)))
        if last - following > last / 2**13:
            same += 1
            assert admitted == theirs.tolist() == lengths(order[:kept], len(runner.names)), seed
    assert same > 100


def test_ties_go_by_position_then_by_row() -> None:
    runner, tied = started(), 0
    for seed in range(200):
        runner.arrive()
        order = runner.ranked(runner.record(dyadic, seed).numpy())
        kept = runner.count() - sum(runner.base)
        tied += 0 < kept < len(order) and order[kept - 1][0] == order[kept][0]
        assert runner.admitted() == lengths(order[:kept], len(runner.names)), seed
    assert tied > 30


def worth(runner: Runner, scores: list[Fraction], most: int) -> list[tuple[int, Fraction]]:
    """Drafts and expected tokens per millisecond of each bucket of the step that is priced."""
    table, batch, base = runner.decider.buckets.table, len(runner.names), sum(runner.base)
    sums = [*accumulate(scores, initial=Fraction(sum(runner.sampling)))]
    row, found = next(i for i, measured in enumerate(table.batches) if measured >= batch), []
    for tokens, cost in zip(table.rule.budgets(batch), table.costs_ms[row], strict=True):
        if tokens >= base:
            drafts = min(tokens - base, len(scores), most)
            found.append((drafts, sums[drafts] / Fraction(float(np.float32(cost)))))
    return found


@pytest.mark.parametrize("most_logits", [10**6, 40])
@pytest.mark.parametrize("confidences", [uniform, dyadic])
def test_budget_is_the_best_of_the_table(confidences: Any, most_logits: int) -> None:
    """Of the confidences that vLLM's manager had on the host, by brute force in exact arithmetic."""
    runner, clear, budgets = started(most_logits=most_logits), 0, set()
    for seed in range(60):
        runner.arrive()
        runner.record(confidences, seed, seed + 1000)
        stale = runner.manager._stale_confidences[runner.manager._stale_idx].np[runner.idx_mapping.numpy()]
        options = worth(runner, [-draft[0] for draft in runner.ranked(stale)], max(0, most_logits - len(runner.names)))
        drafts = runner.count() - sum(runner.base)
        best = max(value for _, value in options)
        mine = max(value for kept, value in options if kept == drafts)
        assert mine >= best * (1 - Fraction(1, 2**14)), seed
        others = [value for kept, value in options if kept != drafts]
        clear += all(value < best * (1 - Fraction(1, 2**14)) for value in others)
        budgets.add(drafts)
    assert clear > 50
    assert len(budgets) > 8


def test_stash() -> None:
    """What `compact_batch` and `reallocate_drafts` read is what vLLM's own method leaves, but for the budget."""
    runner = started()
    runner.record(uniform, 3)
    tokens = runner.count()
    drafts, base, budget = runner.manager._batch_budget
    runner.count(partial(type(runner.manager).get_num_tokens, runner.manager))
    assert (drafts, base) == runner.manager._batch_budget[:2]
    assert {type(n) for n in [*drafts.values(), *base.values(), budget, tokens]} == {int}


def test_costs() -> None:
    """Captured sizes are steps, the cliff behind the last stays, and the drafter's part follows the requests."""
    table = started().decider.buckets.table
    priced = dict(zip(table.rule.budgets(1), table.costs_ms[table.batches.index(8)], strict=True))
    assert {size: priced[size] for size in CAPTURED} == {size: ms + 0.75 for size, ms in CAPTURED.items()}
    beyond = {size: ms for size, ms in priced.items() if size > 96}
    assert len(priced) <= 256
    assert max(beyond) == 512
    for size, ms in beyond.items():
        line = np.interp(size, list(ABOVE), list(ABOVE.values())) - max(0, 144 - size) * 3.5 / 48
        assert ms == pytest.approx(0.75 + line)
    assert table.draft_ms == pytest.approx((0.5, 0.75, 1.25, 1.75))
    assert table.batches == (1, 8, 16, REQUESTS)


def test_more_captured_sizes_than_buckets() -> None:
    verify = [(size, 1 + size / 100) for size in range(1, 400)] + [(500, 9.0), (1000, 15.0)]
    table = cost_table({4: 1.0}, dict(verify), 399, 8, None)
    budgets = table.rule.budgets(8)
    assert 200 < len(budgets) <= 256
    assert {396, 399, 1000} <= set(budgets)
    assert table.costs_ms[0][budgets.index(396)] == pytest.approx(1 + 1 + 3.96)


def test_rank_0_measures_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SimpleNamespace(broadcast_object=lambda value, src: (DRAFTER, [(n, 10 * ms) for n, ms in VERIFY]))
    monkeypatch.setattr(adaptive, "get_tp_group", lambda: first)
    assert started().decider.buckets.table.costs_ms[0][0] == 10 * CAPTURED[1] + 0.5


def test_options(tmp_path: Path) -> None:
    """A table of one's own, a latency, and drafts that every request keeps each third step."""
    CostTable((1, 8), ((5.0, 5.5, 6.0, 9.5),) * 2, TokenCounts((12, 24, 40, 512))).save(tmp_path / "costs.json")
    options = {"costs": str(tmp_path / "costs.json"), "latency_ms": 5.75, "floor": 2, "floor_every": 3}
    runner, starved = started({"dcut": options}), 0
    runner.decider.steps = 0
    for step in range(1, 121):
        runner.arrive()
        runner.record(dyadic, step, step + 1)
        tokens, admitted = runner.count(), runner.admitted()
        floors = [min(2, drafts) for drafts in runner.drafts]
        missing = any(n < floor for n, floor in zip(admitted, floors, strict=True))
        assert not missing or step % 3
        starved += missing
        # buckets of 12 and 24 tokens are fast enough, or else the next one
        least, base = (0 if step % 3 else sum(floors)), sum(runner.base)
        assert tokens <= max(base + least, next(bucket for bucket in (24, 40, 512) if bucket >= base)), step
    assert starved > 20
    assert runner.decider.buckets.table.rule.budgets(1) == (12, 24, 40, 512)


def test_floors_give_way_to_the_sampler() -> None:
    """vLLM's sampler takes so many logits at once."""
    runner = started({"dcut": {"floor": 3, "floor_every": 1}}, most_logits=16)
    for seed in range(50):
        runner.arrive()
        runner.record(uniform, seed)
        assert runner.count() - sum(runner.base) <= max(0, 16 - len(runner.names))
        runner.admitted()


def test_the_rest_of_reallocation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33 returns a fourth value; and whatever happens, other engines find vLLM's ranking."""
    manager, rank = adaptive.AdaptiveVerificationManager, getattr(adaptive, v2.RANK)
    original = manager.reallocate_drafts

    def reallocate_drafts(self: Any, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        return (*original(self, req_ids, idx_mapping), "counts")

    monkeypatch.setattr(manager, "reallocate_drafts", reallocate_drafts)
    runner = started()
    runner.count()
    assert runner.manager.reallocate_drafts(runner.names, runner.idx_mapping)[-1] == "counts"
    with pytest.raises(AssertionError):  # of vLLM: nothing was counted before
        runner.manager.reallocate_drafts(runner.names, runner.idx_mapping)
    assert getattr(adaptive, v2.RANK) is rank


def test_ranking_reads_nothing_on_the_host() -> None:
    """Tensors without values: whatever waits for a device would ask for one."""
    decider = started().decider
    decider.floor = True
    with FakeTensorMode():
        decider.ids = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int32)
        capacities = torch.ones(5, dtype=torch.int32)
        decider.rank(torch.rand(REQUESTS, DRAFTS), torch.arange(5), capacities, 4, DRAFTS)
        with pytest.raises(DataDependentOutputException):
            capacities.tolist()
