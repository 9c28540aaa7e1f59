"""Compare one GPU backend with the CPU on this machine, integer by integer."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from typing import Any

import torch

from dcut_kernels import backends
from dcut_kernels.ops import Backend
from microbench.cases import BENCH, LISTED, Case, random_case
from microbench.gpu.device import labeled, poisoned, to_device, to_host
from microbench.gpu.graphs import history, planned, replays
from microbench.gpu.record import Record, run
from python_tests.compare import composed, first_difference, pick, spilled, tensor_difference

RANDOM = 300
SECONDS = 80.0  # after which no case is begun
SHOWN = 20  # failures that are printed and kept in full
GRAPH_SHAPES = ((1, 7), (8, 15), (64, 15), (256, 15), (1024, 15))
STREAMS = 4
SLEEP = 2_000_000  # cycles, about a millisecond: a kernel on another stream would overtake the copies

ORACLE = backends.chosen("cpu") or "reference"
Counts = dict[str, Any]  # cases, failed, failures and perhaps not_reached


def registry() -> Iterator[Case]:
    """Every case, those that matter most first: a time limit cuts the end."""
    sizes = ((8, 8), (40, 20), (8, 8), (300, 63))
    return chain(BENCH, LISTED, (random_case(seed, *sizes[seed % len(sizes)]) for seed in range(RANDOM)))


def noise(prefix: torch.Tensor, seed: int) -> torch.Tensor:
    """Values that no `log_prefix_sum` returns: decreasing, negative, beyond saturation."""
    values = torch.randint(-(2**31), 2**31, prefix.shape, generator=torch.Generator().manual_seed(seed))
    return (values >> (values & 31)).int()


def differences(case: Case, backend: Backend, oracle: Backend, device: torch.device, seed: int = 0) -> Iterator[str]:
    """Where a backend answers otherwise than the CPU: new buffers, used ones, composed, and each part."""
    inputs = to_device(case.inputs, device)
    new = oracle.select_and_pack(**case.inputs)
    written = oracle.select_and_pack(**case.inputs, out=poisoned(case, torch.device("cpu")))
    yield from labeled("new", first_difference(to_host(backend.select_and_pack(**inputs)), new))
    out = poisoned(case, device)
    backend.select_and_pack(**inputs, out=out)
    yield from labeled("out", first_difference(to_host(out), written) or spilled(out))
    yield from labeled("composed", first_difference(to_host(composed(backend, inputs)), new))
    prefix = oracle.log_prefix_sum(**pick(oracle.log_prefix_sum, case.inputs))
    got = backend.log_prefix_sum(**pick(backend.log_prefix_sum, inputs)).cpu()
    yield from labeled("part", tensor_difference("prefix", got, prefix))
    prefix = noise(prefix, seed)
    depths = oracle.segmented_topk(prefix, **pick(oracle.segmented_topk, case.inputs))
    got = backend.segmented_topk(prefix.to(device), **pick(backend.segmented_topk, inputs)).cpu()
    yield from labeled("part", tensor_difference("depths", got, depths))
    decided = oracle.bucket_argmax(prefix, **pick(oracle.bucket_argmax, case.inputs))
    gotten = backend.bucket_argmax(prefix.to(device), **pick(backend.bucket_argmax, inputs))
    for name, a, b in zip(("decision", "gains"), gotten, decided, strict=True):
        yield from labeled("part", tensor_difference(name, a.cpu(), b))


class Tally:
    """Counts cases and prints those that fail; `save` gets the counts on every failure and now and then."""

    def __init__(self, name: str, save: Callable[[Counts], None] = lambda counts: None) -> None:
        self.name, self.save = name, save
        self.counts: Counts = {"cases": 0, "failed": 0, "failures": []}

    def check(self, name: str, differences: Iterator[str]) -> None:
        """Run one case; only a GPU that no longer answers ends the part."""
        self.counts["cases"] += 1
        try:
            found = next(differences, None)
        except Exception as error:  # a case that raises is a failure like any other
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            self.counts["failed"] += 1
            if self.counts["failed"] <= SHOWN:
                self.counts["failures"].append(f"{name}: {found}")
                print(f"FAILED {self.name} {name}: {found}")
        if found is not None or self.counts["cases"] % 50 == 0:
            self.save(self.counts)
            torch.cuda.synchronize()

    def finish(self, **more: int) -> None:
        self.counts |= more
        self.save(self.counts)
        print(self.name, *(f"{count} {name}" for name, count in self.counts.items() if name != "failures"), sep=", ")


def run_registry(name: str, shard: int, shards: int, until: float, save: Callable[[Counts], None]) -> Counts:
    """Every `shards`-th case, as far as the time goes."""
    device, oracle, backend = torch.device("cuda", 0), backends.get(ORACLE), backends.get(name)
    tally, left = Tally(f"registry {shard + 1} of {shards}", save), 0
    for seed, case in enumerate(registry()):
        if seed % shards == shard:
            if time.time() > until:
                left += 1
            else:
                tally.check(case.name, differences(case, backend, oracle, device, seed))
    tally.finish(not_reached=left)
    return tally.counts


def run_shards(name: str, shards: int, until: float) -> Counts:
    """The registry in several processes: Triton compiles on the host, for seconds a kernel."""
    with ProcessPoolExecutor(shards, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_registry, name, shard, shards, until, nowhere) for shard in range(shards)]
        counts = [future.result() for future in futures]
    return {key: sum((each[key] for each in counts), type(value)()) for key, value in counts[0].items()}


def nowhere(_: Counts) -> None:
    """Shards have no place of their own in the results file."""


def side_streams(cases: Sequence[Case], backend: Backend, oracle: Backend, device: torch.device) -> Iterator[str]:
    """Several streams at once, each with calls whose inputs arrive late on that very stream."""
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    arrived = [to_device(case.inputs, device) for case in cases]
    waiting: list[dict[str, Any]] = [
        {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for n, v in a.items()} for a in arrived
    ]
    results = [poisoned(case, device) for case in cases]
    torch.cuda.synchronize(device)
    for i in range(len(cases)):
        with torch.cuda.stream(streams[i % STREAMS]):
            torch.cuda._sleep(SLEEP)
            for name, value in arrived[i].items():
                if isinstance(value, torch.Tensor):
                    waiting[i][name].copy_(value)
            backend.select_and_pack(**waiting[i], out=results[i])
    torch.cuda.synchronize(device)
    for case, result in zip(cases, results, strict=True):
        expected = oracle.select_and_pack(**case.inputs, out=poisoned(case, torch.device("cpu")))
        yield from labeled(case.name, first_difference(to_host(result), expected) or spilled(result))


def correctness(record: Record, args: argparse.Namespace) -> bool:
    """Graphs, streams and devices first, then the registry as far as the time goes."""
    until, device, oracle = time.time() + SECONDS, torch.device("cuda", 0), backends.get(ORACLE)
    try:
        backend = backends.get(args.which)
    except RuntimeError as error:
        absent = shutil.which("nvcc") is None if args.which == "cuda" else find_spec("triton") is None
        record["skipped" if absent else "error"] = str(error)
        print(error)
        return absent
    everything = next(case for case in LISTED if case.name == "everything-at-once")
    shapes = [case for case in BENCH if (case.batch, case.draft_len) in GRAPH_SHAPES]
    shapes += [case for case in LISTED if case.name in ("everything-at-once", "large-everything", "shape-33x33")]
    shapes = [Case(c.name, c.inputs | {"num_reqs": torch.tensor([c.batch], dtype=torch.int32)}) for c in shapes]
    graphs, streams = (Tally(name, partial(record.__setitem__, name)) for name in ("graphs", "streams"))
    for case in shapes:
        graphs.check(case.name, replays(case, backend, oracle, device))
        graphs.check(f"{case.name} history", history(case, backend, oracle, device))
    for policy in ("argmax", "early_stop", "history"):
        graphs.check(f"planner {policy}", planned(policy, backend, oracle, device))
    graphs.finish()
    streams.check("side streams", side_streams(shapes * 3, backend, oracle, device))
    for index in range(1, torch.cuda.device_count()):  # while device 0 is the current one
        streams.check(f"device {index}", differences(everything, backend, oracle, torch.device("cuda", index)))
    streams.finish(devices=torch.cuda.device_count())
    if args.which == "triton":
        counts = run_shards(args.which, min(8, os.cpu_count() or 1), until)
        record["registry"] = counts
    else:
        counts = run_registry(args.which, 0, 1, until, partial(record.__setitem__, "registry"))
    return not any(each["failed"] for each in (graphs.counts, streams.counts, counts))


if __name__ == "__main__":
    sys.exit(run("correctness", correctness, "cuda", "triton"))
