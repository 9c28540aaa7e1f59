"""The kernels as NVRTC compiles them at run time, launched through CuPy, against the CPU."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

import torch

from dcut_kernels import backends
from microbench.cases import BENCH, LISTED, Case, random_case
from microbench.gpu.correctness import ORACLE, Tally, differences
from microbench.gpu.graphs import replays
from microbench.gpu.record import Record, run


def nvrtc(record: Record, _: argparse.Namespace) -> bool:
    """The timed shapes, some of the listed cases and some at random, and one captured call."""
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        record["skipped"] = f"CuPy is not there: {error}"
        print(record.read()["skipped"])
        return True
    from dcut_kernels import jit

    device, oracle = torch.device("cuda", 0), backends.get(ORACLE)
    start = time.perf_counter()
    jit.backend.select_and_pack(**{n: v.to(device) for n, v in BENCH[0].inputs.items()})
    torch.cuda.synchronize()
    record["first_call_seconds"] = round(time.perf_counter() - start, 2)
    cases = Tally("cases", partial(record.__setitem__, "cases"))
    for seed, case in enumerate([*BENCH, *LISTED[::8], *(random_case(seed, 40, 20) for seed in range(30))]):
        cases.check(case.name, differences(case, jit.backend, oracle, device, seed))
    cases.finish()
    graph = Tally("graph", partial(record.__setitem__, "graph"))
    case = next(case for case in BENCH if case.name == "64x15")
    inputs = case.inputs | {"num_reqs": torch.tensor([64], dtype=torch.int32)}
    graph.check(case.name, replays(Case(case.name, inputs), jit.backend, oracle, device))
    graph.finish()
    return not cases.counts["failed"] and not graph.counts["failed"]


if __name__ == "__main__":
    sys.exit(run("nvrtc", nvrtc))
