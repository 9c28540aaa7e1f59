"""One timed call of `select_and_pack`; `run.py` decides which, in which order, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import dcut_kernels
from dcut_kernels import VerifyBatch
from microbench import eager
from microbench.cases import Case

THREADS = torch.get_num_threads()
ROUND = 1e-3  # seconds: calls are repeated until a round takes about this long


def function_of(way: str, case: Case) -> Callable[[], VerifyBatch]:
    """The call to time: an engine's `.out` into reused buffers, new buffers each time, or plain torch operators."""
    if way.startswith("eager"):
        return partial(eager.select_and_pack, **case.inputs)
    if way == "allocating":
        return partial(dcut_kernels.select_and_pack, **case.inputs)
    out = VerifyBatch.allocate(case.batch, case.draft_len, case.buckets)
    return partial(dcut_kernels.select_and_pack, **case.inputs, out=out)


@pytest.fixture
def threads(way: str) -> Iterator[None]:
    """All threads for the one way that asks for them; the operator itself uses one."""
    torch.set_num_threads(THREADS if way == "eager_threads" else 1)
    yield
    torch.set_num_threads(THREADS)


@pytest.mark.usefixtures("threads")
def test_select_and_pack(benchmark: BenchmarkFixture, turn: int, case: Case, way: str) -> None:
    function = function_of(way, case)
    function()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    rounds = 9 if seconds < 10 * ROUND else 3
    benchmark.extra_info |= {"batch": case.batch, "draft_len": case.draft_len, "way": way, "turn": turn}
    benchmark.pedantic(function, rounds=rounds, iterations=max(1, round(ROUND / seconds)), warmup_rounds=1)
