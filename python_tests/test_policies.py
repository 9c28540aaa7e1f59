"""Early stop, the budget of the next step, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dcut_kernels import VerifyBatch, backends, reference
from dcut_kernels.ops import Backend
from microbench.cases import LISTED, Case, make, random_case
from python_tests.compare import assert_same, composed

INT32_MAX = 2**31 - 1
IDENTITY = torch.arange(65, dtype=torch.int32) * 2**17
Cost = Callable[[int], int]  # of a step of so many tokens


def step_of(case: Case) -> reference.Step:
    """The ranked positions of a case."""
    inputs = case.inputs
    options = {name: inputs[name].tolist() for name in ("min_keep", "weight") if name in inputs}
    rows = reference.read_rows(case.batch, case.batch, case.draft_len, **options)
    shifted = inputs.get("score") == "shifted"
    prefix = reference.prefix_sums(inputs["confidence"].tolist(), rows, case.draft_len, shifted, False)
    return reference.Step(rows, prefix, case.capacity)


def first_stop(step: reference.Step, cost: Cost) -> int:
    """The first number of tokens after which the next one is not worth its cost, one by one."""
    tokens = step.lowest
    while tokens < step.highest:
        gain = step.gain(tokens, True)
        if (step.gain(tokens + 1, True) - gain) * cost(tokens) <= gain * (cost(tokens + 1) - cost(tokens)):
            break
        tokens += 1
    return tokens


def convex_case(seed: int) -> tuple[Case, Cost]:
    """Random confidences, buckets, and a convex cost of which each bucket gets height and slope."""
    rng = np.random.default_rng(seed)
    batch, draft_len = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    base, slope, bend = int(rng.integers(1, 500)), int(rng.integers(0, 60)), int(rng.integers(0, 3))

    def cost(tokens: int) -> int:
        return base + slope * tokens + bend * tokens * (tokens - 1) // 2

    budgets = sorted(rng.integers(1, batch * (draft_len + 1) + 4, int(rng.integers(1, 30))).tolist())
    options: dict[str, Any] = {"score": "shifted"} if rng.random() < 0.5 else {}
    if rng.random() < 0.3:
        options["min_keep"] = rng.integers(0, draft_len + 1, batch)
    if rng.random() < 0.3:
        options["weight"] = rng.uniform(0.1, 4, batch)
    envelope = [[cost(k), cost(k + 1) - cost(k)] for k in budgets]
    confidence = torch.from_numpy(rng.beta(2, 0.7, (batch, draft_len)).astype(np.float32))
    return make(str(seed), confidence, budgets, [1.0] * len(budgets), policy="early_stop", envelope=envelope,
                seed=seed, **options), cost  # fmt: skip


def test_early_stop_is_the_first_stop_rounded_up(compiled: Backend) -> None:
    """Asking at buckets finds what walking from token to token finds."""
    stopped_inside = 0
    for seed in range(60 if compiled.name == "simt" else 400):
        case, cost = convex_case(seed)
        step, budgets = step_of(case), case.inputs["budgets"].tolist()
        stop = first_stop(step, cost)
        raw = min((k for k in budgets if k >= stop), default=budgets[-1])
        batch = compiled.select_and_pack(**case.inputs)
        bucket, tokens, _, padded = batch.decision.tolist()
        assert (budgets[bucket], bucket) == (raw, budgets.index(raw)), case
        assert (tokens, padded) == (step.clamp(raw), max(step.clamp(raw), raw)), case
        assert batch.keep_lens.tolist() == step.depths(tokens), case
        stopped_inside += step.lowest < stop < step.highest
    assert stopped_inside > 10


def test_early_stop_with_every_budget_is_the_global_argmax(compiled: Backend) -> None:
    for seed in range(40 if compiled.name == "simt" else 150):
        case, cost = convex_case(seed)
        step = step_of(case)
        every = list(range(step.lowest, step.highest + 1))[:256]
        tables = {"budgets": torch.tensor(every, dtype=torch.int32),
                  "costs": torch.tensor([float(cost(k)) for k in every])}  # fmt: skip
        envelope = torch.tensor([[cost(k), cost(k + 1) - cost(k)] for k in every], dtype=torch.int32)
        early = compiled.select_and_pack(**case.inputs | tables | {"envelope": envelope})
        inputs = {name: value for name, value in case.inputs.items() if name not in ("policy", "envelope")}
        best = compiled.select_and_pack(**inputs | tables)
        assert_same(early, best)


def test_early_stop_looks_at_nothing_behind_the_bucket(variant: Backend) -> None:
    """Scores behind the position that follows a bucket do not move the choice."""
    confidence = torch.full((4, 8), 0.9)
    budgets = [4, 12, 20, 36]
    case = make("causal", confidence, budgets, [1.0] * 4, policy="early_stop", envelope=[[800, 70]] * 4)
    chosen = variant.select_and_pack(**case.inputs).decision[0].item()
    assert 0 < chosen < 3
    for c in (0.0, 0.5, 1.0):
        later = confidence.clone()
        later[:, budgets[chosen] // 4 :] = c
        assert variant.select_and_pack(**case.inputs | {"confidence": later}).decision[0] == chosen


def test_history_uses_what_the_step_before_chose(variant: Backend) -> None:
    """A replay: the same tensors step after step, the budget in the first half of what is written."""
    steps = [case for case in map(random_case, range(2000)) if fits(case)][: 12 if variant.name == "simt" else 40]
    next_budget = torch.tensor([INT32_MAX, -3], dtype=torch.int32)  # counts on through 2^32
    host = torch.tensor([0])
    counts = []
    for case in steps:
        inputs = case.inputs | {"policy": "history", "budget": next_budget[:1], "next_budget": next_budget,
                                "host_budget": host}  # fmt: skip
        given = int(next_budget[0])
        batch = variant.select_and_pack(**inputs)
        expected = backends.get("reference").select_and_pack(**case.inputs | {"budget": given})
        assert_same(batch, expected)
        chosen = int(backends.get("reference").select_and_pack(**case.inputs).decision[0])
        raw = INT32_MAX if chosen < 0 else case.inputs["budgets"].reshape(-1, case.buckets)[0, chosen].item()
        assert next_budget[0] == raw
        word = int(host)
        assert word & 0xFFFFFFFF == raw
        counts.append(word >> 32 & 0xFFFFFFFF)
        assert counts[-1] == int(next_budget[1]) & 0xFFFFFFFF
    assert counts == [(2**32 - 2 + j) % 2**32 for j in range(len(steps))]


def fits(case: Case) -> bool:
    inputs = case.inputs
    names = ("policy", "next_budget", "budget")
    return inputs["budgets"].dim() == 1 and case.buckets > 0 and not any(name in inputs for name in names)


def test_history_in_parts(variant: Backend) -> None:
    for case in LISTED:
        if case.name.startswith("history-6"):
            assert_same(composed(variant, case.inputs), variant.select_and_pack(**case.inputs))


def test_a_host_tells_a_new_word_from_a_stale_one(variant: Backend) -> None:
    """The count changes with every step, even if the budget does not."""
    case = next(case for case in LISTED if case.name == "next-budget")
    host, seen = torch.tensor([0]), set()
    inputs = case.inputs | {"next_budget": torch.zeros(2, dtype=torch.int32), "host_budget": host}
    for _ in range(5):
        variant.select_and_pack(**inputs)
        assert int(host) not in seen
        seen.add(int(host))
    assert {word & 0xFFFFFFFF for word in seen} == {int(inputs["next_budget"][0])}


def test_calibration_is_the_line_between_its_entries(variant: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(300, 5, generator=generator) ** 3
    plain = variant.log_prefix_sum(confidence[:, :1].contiguous())[:, 0].tolist()
    table = torch.randint(0, 2**18, (5, 65), generator=generator, dtype=torch.int32).cumsum(1).int()
    got = variant.log_prefix_sum(confidence[:, :1].contiguous(), calibration=table[:1].contiguous())[:, 0].tolist()
    entries = table[0].tolist()
    for q, calibrated in zip(plain, got, strict=True):
        cell, rest = divmod(q, 2**17)
        exact = (
            entries[cell] + (entries[cell + 1] - entries[cell]) * rest / 2**17 if cell < 64 else entries[64] + q - 2**23
        )
        assert exact - 1 < calibrated <= exact
    sums = variant.log_prefix_sum(confidence, calibration=table)
    each = [variant.log_prefix_sum(confidence[:, k : k + 1].contiguous(), calibration=table[k : k + 1].contiguous())
            for k in range(5)]  # fmt: skip
    assert torch.equal(sums, torch.cat(each, 1).cumsum(1).clamp(max=2**26 - 1).int())


def test_calibration_by_the_identity_changes_nothing(variant: Backend) -> None:
    cases = [case for case in map(random_case, range(400)) if "calibration" not in case.inputs and case.batch]
    for case in cases[: 30 if variant.name == "simt" else 150]:
        identity = IDENTITY.repeat(case.draft_len, 1)
        without = variant.select_and_pack(**case.inputs)
        assert_same(variant.select_and_pack(**case.inputs, calibration=identity), without)


def test_calibration_keeps_the_order_and_what_is_impossible(variant: Backend) -> None:
    """A rising table never turns two confidences around, and a confidence of 0 stays 0."""
    confidence = torch.linspace(0, 1, 500)[:, None].contiguous()
    table = (torch.arange(65) * 2**15 + 3).int()[None]
    sums = variant.log_prefix_sum(confidence, calibration=table)[:, 0]
    assert (sums.diff() <= 0).all()
    assert sums[-1] == 3
    dead = make("zero", torch.zeros(2, 3), [2, 8], [1, 1], calibration=torch.zeros(3, 65))
    assert variant.select_and_pack(**dead.inputs).gains.tolist() == [2 * 2**30] * 2


def test_a_result_has_no_room_for_the_next_budget(variant: Backend) -> None:
    """It goes where the caller says, and nowhere else."""
    assert "next_budget" not in VerifyBatch._fields
    around = torch.full((4,), 77, dtype=torch.int32)
    case = next(case for case in LISTED if case.name == "next-budget")
    variant.select_and_pack(**case.inputs | {"next_budget": around[1:3]})
    assert around[[0, 3]].tolist() == [77, 77]
    assert around[2] == 78


@pytest.mark.parametrize("name", ["next-budget", "history-6-40"])
def test_the_next_budget_is_the_argmax_whether_or_not_one_is_given(variant: Backend, name: str) -> None:
    case = next(case for case in LISTED if case.name == name)
    next_budget = torch.zeros(2, dtype=torch.int32)
    free = {key: value for key, value in case.inputs.items() if key not in ("policy", "budget")}
    bucket = variant.select_and_pack(**free).decision[0]
    variant.select_and_pack(**case.inputs | {"next_budget": next_budget})
    assert next_budget.tolist() == [case.inputs["budgets"][bucket].item(), 1]
