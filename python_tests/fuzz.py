"""Compare a backend with the reference, integer by integer, over random cases.

``python -m python_tests.fuzz --cases 1000000`` prints the seed of every case that fails, and ``--seed N --cases 1``
runs that one again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dcut_kernels import _load, backends
from dcut_kernels.ops import Backend
from microbench.cases import Case, random_case
from python_tests.compare import (
    composed,
    first_difference,
    instruction_sets,
    pick,
    poisoned,
    spilled,
    tensor_difference,
)
from python_tests.judge import Judge

CHUNK = 200  # cases a task


def case_of(seed: int) -> Case:
    """Mostly small cases; every 50th is larger, every 1000th large."""
    if seed % 1000 == 999:
        return random_case(seed, 300, 63)
    return random_case(seed, 40, 20) if seed % 50 == 49 else random_case(seed)


def garbage(prefix: torch.Tensor, seed: int) -> torch.Tensor:
    """Values that no `log_prefix_sum` returns: decreasing, negative, beyond saturation."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**31), 2**31, prefix.shape, generator=generator, dtype=torch.int32)
    spread = torch.randint(0, 32, prefix.shape, generator=generator, dtype=torch.int32)
    return torch.where(spread < 8, prefix, noise >> spread)


def differences(case: Case, backend: Backend, reference: Backend, seed: int) -> Iterator[str]:
    """Where a backend answers otherwise than the reference: fused, into used buffers, and in parts."""
    new = reference.select_and_pack(**case.inputs)
    yield from next_differences(case, backend, reference)
    written = new
    if "base_lens" in case.inputs:  # otherwise no entry is left as it was
        written = reference.select_and_pack(**case.inputs, out=poisoned(case))
    yield from _labeled("new", first_difference(backend.select_and_pack(**case.inputs), new))
    out = backend.select_and_pack(**case.inputs, out=poisoned(case))
    yield from _labeled("out", first_difference(out, written) or spilled(out))
    yield from _labeled("composed", first_difference(composed(backend, case.inputs), new))
    arguments = pick(reference.log_prefix_sum, case.inputs)
    prefix = reference.log_prefix_sum(**arguments)
    yield from _labeled("part", tensor_difference("prefix", backend.log_prefix_sum(**arguments), prefix))
    if seed % 4 == 0:
        yield from _ranked_differences(case, backend, reference, garbage(prefix, seed) if seed % 8 == 0 else prefix)


def next_differences(case: Case, backend: Backend, reference: Backend) -> Iterator[str]:
    """What is written for the next step."""
    names = [name for name in ("next_budget", "host_budget") if name in case.inputs]
    both = [case.inputs | {name: case.inputs[name].clone() for name in names} for _ in range(2)]
    for one, inputs in zip((backend, reference), both, strict=True):
        one.select_and_pack(**inputs)
    for name in names:
        yield from _labeled("new", tensor_difference(name, both[0][name], both[1][name]))


def _ranked_differences(case: Case, backend: Backend, reference: Backend, prefix: torch.Tensor) -> Iterator[str]:
    """The same of the two parts that rank given prefix sums, whatever these hold."""
    arguments = pick(reference.segmented_topk, case.inputs)
    got, expected = (b.segmented_topk(prefix, **arguments) for b in (backend, reference))
    yield from _labeled("part", tensor_difference("depths", got, expected))
    arguments = pick(reference.bucket_argmax, case.inputs)
    both = zip(*(b.bucket_argmax(prefix, **arguments) for b in (backend, reference)), strict=True)
    for name, (got, expected) in zip(("decision", "gains"), both, strict=True):
        yield from _labeled("part", tensor_difference(name, got, expected))


def _labeled(label: str, difference: str | None) -> Iterator[str]:
    if difference is not None:
        yield f"{label} {difference}"


def run_seeds(seeds: Sequence[int], backend_name: str, judge_every: int) -> list[tuple[int, str]]:
    """Run some cases and return the seeds that failed, each with its first difference."""
    torch.set_num_threads(1)
    backend, reference = backends.get(backend_name), backends.get("reference")
    sets = instruction_sets() if backend_name == "cpu" else []
    failures = []
    for seed in seeds:
        if sets:
            _load.cpu_isa(sets[seed % len(sets)])
        try:
            case = case_of(seed)
            found = next(differences(case, backend, reference, seed), None)
            if found is None and judge_every and seed % judge_every == 0 and "calibration" not in case.inputs:
                found = next(iter(Judge(case.inputs).complaints(backend.select_and_pack(**case.inputs))), None)
        except Exception as error:  # a case that raises is a failure like any other, and the rest still runs
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            failures.append((seed, found))
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m python_tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--backend", default=backends.chosen(), choices=backends.available())
    parser.add_argument("--judge-every", type=int, default=50, help="judge one case in so many; 0: none")
    args = parser.parse_args(arguments)

    seeds = range(args.seed, args.seed + args.cases)
    chunks = [seeds[i : i + CHUNK] for i in range(0, args.cases, CHUNK)]
    work = partial(run_seeds, backend_name=args.backend, judge_every=args.judge_every)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeElapsedColumn())
    start, failed = time.perf_counter(), 0
    with Progress(*columns, TimeRemainingColumn()) as progress, ProcessPoolExecutor(args.processes) as pool:
        task = progress.add_task("cases", total=args.cases, failed=0)
        results = map(work, chunks) if args.processes == 1 else pool.map(work, chunks)
        for chunk, failures in zip(chunks, results, strict=True):
            for seed, found in failures:
                progress.console.print(f"seed {seed}: {found}", markup=False, soft_wrap=True)
            failed += len(failures)
            progress.update(task, advance=len(chunk), failed=failed)
    seconds = time.perf_counter() - start
    print(f"{args.cases} cases of backend '{args.backend}' in {seconds:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
