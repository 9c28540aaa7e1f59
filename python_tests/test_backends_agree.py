"""Every backend equals the reference on every integer of every result, tails and untouched entries included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dcut_kernels
from dcut_kernels import VerifyBatch, backends
from dcut_kernels.ops import Backend
from microbench.cases import BENCH, LISTED, Case, random_case
from python_tests import fuzz
from python_tests.compare import POISON, assert_same, composed, poisoned, spilled

Answer = Callable[[Case], tuple[VerifyBatch, VerifyBatch]]
CASES = [*LISTED, *BENCH, *(random_case(seed, 40, 20) for seed in range(100)), random_case(7, 500, 40)]


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(compiled: Backend, reference: Answer, case: Case) -> None:
    new, written = reference(case)
    assert_same(compiled.select_and_pack(**case.inputs), new)
    out = poisoned(case)
    assert compiled.select_and_pack(**case.inputs, out=out) is out
    assert_same(out, written)
    assert spilled(out) is None


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_public_functions_are_those_of_the_chosen_backend(case: Case) -> None:
    chosen = backends.get(backends.chosen())
    assert_same(dcut_kernels.select_and_pack(**case.inputs), chosen.select_and_pack(**case.inputs))


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_nothing_depends_on_what_buffers_held(backend: Backend, case: Case) -> None:
    """Whatever two different poisons leave different was not written, and only base tokens may be."""
    first = backend.select_and_pack(**case.inputs, out=poisoned(case))
    second = backend.select_and_pack(**case.inputs, out=poisoned(case, 77))
    for name, a, b in zip(VerifyBatch._fields, first, second, strict=True):
        left = a != b
        if name in ("token_ids", "positions", "request_ids", "slot_mapping", "draft_index"):
            assert (a[left] == POISON).all()
            assert (b[left] == 77).all()
            assert "base_lens" in case.inputs or not left.any()
        else:
            assert not left.any()


def test_reused_buffers_forget_the_last_step(compiled: Backend, reference: Answer) -> None:
    cases = [random_case(seed, 30, 12) for seed in range(300)]
    steps = [case for case in cases if "base_lens" not in case.inputs]
    buffers: dict[tuple, VerifyBatch] = {}
    for case in steps:
        shape = (case.batch, case.draft_len, case.buckets, case.capacity, case.inputs["draft_ids"].dtype)
        out = buffers.setdefault(shape, VerifyBatch.allocate(*shape))
        for _ in range(2):
            assert_same(compiled.select_and_pack(**case.inputs, out=out), reference(case)[0])
    case = next(case for case in BENCH if case.name == "8x15")
    out = VerifyBatch.allocate(case.batch, case.draft_len, case.buckets)
    for ratio in (1.0, 0.2, 0.7):  # with ever other totals
        inputs = case.inputs | {"budget": int(ratio * case.capacity)}
        expected = backends.get("reference").select_and_pack(**inputs)
        assert_same(compiled.select_and_pack(**inputs, out=out), expected)


def test_inputs_are_left_alone(backend: Backend) -> None:
    case = next(case for case in LISTED if case.name == "everything-at-once")
    before = {name: v.clone() for name, v in case.inputs.items() if isinstance(v, torch.Tensor)}
    backend.select_and_pack(**case.inputs, out=poisoned(case))
    for name, value in before.items():
        assert torch.equal(value, case.inputs[name]), name


def test_short_fuzz(backend: Backend) -> None:
    """Of a compiled backend, every instruction set in turn."""
    seeds = range({"reference": 200, "simt": 600}.get(backend.name, 3000))
    assert fuzz.run_seeds(seeds, backend.name, judge_every=50) == []


def test_fuzz_reports_the_seeds_that_fail(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cases", "30", "--seed", "100", "--processes", "1", "--backend", backend.name]
    assert fuzz.main(arguments) == 0
    assert f"30 cases of backend '{backend.name}' in" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "composed", lambda *a: composed(*a)._replace(gains=torch.zeros(300, dtype=torch.int64)))
    assert fuzz.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "seed 100: composed gains: torch.int64 [300], expected torch.int64 [" in printed
    assert "30 failed" in printed
