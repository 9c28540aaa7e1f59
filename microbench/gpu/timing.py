"""Time one call inside a CUDA graph against an empty kernel and against one elementwise kernel, which only reads the
confidences and writes as many numbers, and the call itself against plain torch operators.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from dcut_kernels import VerifyBatch, backends
from microbench import eager
from microbench.cases import BENCH, Case, bench_case, make
from microbench.gpu.device import capture, to_device
from microbench.gpu.empty import empty_kernel
from microbench.gpu.record import Record, run

NODES = 100  # calls in a graph
REPLAYS = 10  # in a row, between two events
TURNS = 9  # of all ways; a figure is the median
CALLS = 100  # in a row, for the time the host spends on one
COMPILED = ("64x15", "256x15")  # where torch.compile is timed too
MOST_EMPTIES, LEAST_SPEEDUP = 3.0, 20.0  # at 64x15


def more_buckets(batch: int, draft_len: int, buckets: int) -> Case:
    """The timed case with budgets spread evenly from the smallest to all."""
    case = bench_case(batch, draft_len)
    budgets = np.linspace(batch, batch * (draft_len + 1), buckets).round()
    return make(f"{case.name}-R{buckets}", case.inputs["confidence"], budgets, seed=draft_len)


def timed_cases() -> list[Case]:
    special = []
    for batch, draft_len in ((64, 15), (256, 15)):
        special += [more_buckets(batch, draft_len, buckets) for buckets in (32, 256)]
        special.append(make(f"{batch}x{draft_len}-ties", torch.full((batch, draft_len), 0.875), seed=draft_len))
    first = [case for case in BENCH if case.name in COMPILED]
    return [*first, *(case for case in BENCH if case not in first), *special]


def in_turns(ways: Mapping[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Median of each way in microseconds; all ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            times[name].append(way())
    return {name: statistics.median(values) for name, values in times.items()}


def per_node(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one of the graph's calls, by events around some replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (REPLAYS * NODES)


def wall(call: Callable[[], Any], calls: int, *, wait: bool) -> float:
    """Microseconds a call takes by the host's clock, with or without waiting for the GPU at the end."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds * 1e6 / calls


def calls_of(case: Case, device: torch.device, record: Record) -> dict[str, Callable[[], VerifyBatch]]:
    """The call of every GPU backend that works on a case, into buffers of its own."""
    inputs = to_device(case.inputs, device)
    found: dict[str, Callable[[], VerifyBatch]] = {}
    for name in ("cuda", "triton"):
        try:
            out = VerifyBatch.allocate(case.batch, case.draft_len, case.buckets, device=device)
            call = partial(backends.get(name).select_and_pack, **inputs, out=out)
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:  # the other one is timed all the same
            record[f"{name}_error"] = f"{case}: {type(error).__name__}: {error}"
            print(f"{name} not timed on {case}: {error}")
    return found


def measure(case: Case, launch_empty: Callable[[], None], device: torch.device, record: Record) -> dict[str, Any]:
    """One row: times in a graph, of the host's call, and of plain torch operators."""
    calls = calls_of(case, device, record)
    inputs = to_device(case.inputs, device)
    doubled = torch.empty_like(inputs["confidence"])
    floors: dict[str, Callable[[], Any]] = {"empty": launch_empty}
    floors["elementwise"] = partial(torch.mul, inputs["confidence"], 2.0, out=doubled)
    graphs = {name: capture(call, NODES) for name, call in (floors | calls).items()}
    row: dict[str, Any] = {"case": case.name, "batch": case.batch, "draft_len": case.draft_len, "buckets": case.buckets}
    row |= in_turns({f"{name}_us": partial(per_node, graph) for name, graph in graphs.items()}, TURNS)
    row |= in_turns({f"{name}_host_us": partial(wall, call, CALLS, wait=False) for name, call in calls.items()}, 3)
    obvious = partial(eager.select_and_pack, **inputs)
    wall(obvious, 3, wait=True)
    row["eager_us"] = in_turns({"eager": partial(wall, obvious, 20, wait=True)}, 5)["eager"]
    for name in calls:
        row[f"{name}_per_empty"] = row[f"{name}_us"] / row["empty_us"]
        row[f"eager_per_{name}"] = row["eager_us"] / row[f"{name}_us"]
    return row


def compiled_us(case: Case, device: torch.device) -> float:
    """The plain operators under `torch.compile`, once compiled."""
    call = partial(torch.compile(eager.select_and_pack, dynamic=False), **to_device(case.inputs, device))
    wall(call, 3, wait=True)
    return in_turns({"compiled": partial(wall, call, 20, wait=True)}, 5)["compiled"]


def goals(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What is promised at 64x15 of the backend that serves CUDA tensors, and what was measured."""
    name = next((name for name in ("cuda", "triton") if f"{name}_us" in row), None)
    if name is None:
        return []
    empties, speedup = row[f"{name}_per_empty"], row[f"eager_per_{name}"]
    found = (
        ("empty kernels, at most", MOST_EMPTIES, empties, empties <= MOST_EMPTIES),
        ("times faster than eager, at least", LEAST_SPEEDUP, speedup, speedup >= LEAST_SPEEDUP),
    )
    return [
        {"goal": f"{row['case']}, {name}: {what}", "bound": bound, "measured": measured, "met": met}
        for what, bound, measured, met in found
    ]


def timing(record: Record, _: argparse.Namespace) -> bool:
    """Every case, most wanted first; each row is on disk before the next is measured."""
    device = torch.device("cuda", 0)
    record["empty_kernel"], launch_empty = empty_kernel()
    rows: list[dict[str, Any]] = []
    for case in timed_cases():
        row = measure(case, launch_empty, device, record)
        rows.append(row)
        record["rows"] = rows
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        if len(rows) == 1:
            record["goals"] = goals(row)
    for row in rows:
        if row["case"] in COMPILED:
            try:
                row["compiled_us"] = compiled_us(bench_case(row["batch"], row["draft_len"]), device)
                print(f"{row['case']}: eager under torch.compile {row['compiled_us']:.1f} us")
            except Exception as error:  # the compiler is not what is checked here
                record["compiled_error"] = f"{type(error).__name__}: {error}"[:1000]
                print(f"torch.compile: {type(error).__name__}: {str(error)[:300]}")
            record["rows"] = rows
    met = [goal["met"] for goal in goals(rows[0])]
    return len(met) == 2 and all(met)


if __name__ == "__main__":
    sys.exit(run("timing", timing))
