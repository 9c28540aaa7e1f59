"""The backends under test, and what the reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dcut_kernels import VerifyBatch, _load, backends
from dcut_kernels.ops import Backend
from microbench.cases import BENCH, LISTED, Case
from python_tests.compare import instruction_sets, poisoned


def _variants(name: str) -> list[str]:
    return [f"cpu-{isa}" for isa in instruction_sets()] if name == "cpu" else [name]


# "cuda" takes no CPU tensors, and Triton's interpreter takes seconds a case: it has tests of its own.
NAMES = [name for name in backends.available() if name not in ("cuda", "triton")]
NOT_COMPILED = pytest.param(None, marks=pytest.mark.skip(reason="only the reference is built"))
COMPILED: list[Any] = [variant for name in NAMES if name != "reference" for variant in _variants(name)]


@pytest.fixture(scope="session", autouse=True)
def cases_stay() -> Iterator[None]:
    """No test may write to what a case gives the operator: the reference answers each case once."""
    tensors = [
        (f"{case.name}: {name}", value, value.clone())
        for case in (*LISTED, *BENCH)
        for name, value in case.inputs.items()
        if isinstance(value, torch.Tensor) and name not in ("next_budget", "host_budget")
    ]
    yield
    assert [name for name, now, before in tensors if not torch.equal(now.nan_to_num(), before.nan_to_num())] == []


def _use(variant: str) -> Iterator[Backend]:
    name, _, isa = variant.partition("-")
    if not isa:
        yield backends.get(name)
        return
    start = _load.cpu_isa()
    _load.cpu_isa(isa)
    yield backends.get(name)
    _load.cpu_isa(start)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend that takes CPU tensors here, but Triton's interpreter."""
    return backends.get(request.param)


@pytest.fixture(params=COMPILED or [NOT_COMPILED])
def compiled(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each of them but the reference, with every instruction set that works here."""
    yield from _use(request.param)


@pytest.fixture(params=["reference", *COMPILED])
def variant(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each of them, with every instruction set."""
    yield from _use(request.param)


@pytest.fixture(scope="session")
def reference() -> Callable[[Case], tuple[VerifyBatch, VerifyBatch]]:
    """What the reference answers to a case: new buffers, and poisoned ones."""
    known: dict[str, tuple[VerifyBatch, VerifyBatch]] = {}
    backend = backends.get("reference")

    def answer(case: Case) -> tuple[VerifyBatch, VerifyBatch]:
        if case.name not in known:
            new = backend.select_and_pack(**case.inputs)
            known[case.name] = new, backend.select_and_pack(**case.inputs, out=poisoned(case))
        return known[case.name]

    return answer
