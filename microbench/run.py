"""Time `select_and_pack` on the CPU against the obvious way in torch: a table, ``results.json`` and ``results.csv``.

Nothing is reported unless the agreement tests of the timed cases pass first.  All ways take turns in one process, and
a ratio is that of neighbors in time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # the repository instead of this folder

from dcut_kernels import _load, backends  # noqa: E402
from microbench.cases import BENCH, Case  # noqa: E402

GATE = ROOT / "python_tests" / "test_backends_agree.py"
WAYS = ("eager", "out", "allocating", "eager_threads")
OUT_TARGETS = {(8, 7): 10, (8, 15): 10, (8, 31): 10, (64, 15): 12, (256, 15): 10, (1024, 15): 15}
ALLOCATING_TARGET = 8
GROWTH_TARGET = 10  # from B=64 to B=1024 at D=15

Row = dict[str, Any]


class Gate:
    """Counts the agreement tests that pass."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


class Turns:
    """Gives the timed test its cases: every way of a case, every case of a turn, then the next turn."""

    def __init__(self, cases: Sequence[Case], turns: int) -> None:
        self.cases, self.turns = cases, turns

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("turn", range(self.turns))
        metafunc.parametrize("case", self.cases, ids=str)
        metafunc.parametrize("way", WAYS)


def run_pytest(*arguments: object, plugin: object) -> int:
    return pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *map(str, arguments)], plugins=[plugin])


def verify(cases: Sequence[Case], isa: str) -> None:
    """Run the agreement tests of `cases` with one instruction set; exit unless all pass."""
    gate = Gate()
    chosen = f"test_equals_reference and cpu-{isa} and ({' or '.join(f'-{case}]' for case in cases)})"
    status = run_pytest(GATE, "-k", chosen, "--benchmark-skip", plugin=gate)
    if status != 0 or gate.passed < len(cases):
        sys.exit(f"no report: of {len(cases)} agreement tests {gate.passed} passed (pytest status {status})")


def measure(cases: Sequence[Case], turns: int) -> tuple[list[Row], Row]:
    """Time every way of every case; returns one entry per case, way and turn, and the machine."""
    with TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        status = run_pytest(
            ROOT / "microbench" / "bench_select.py", "--benchmark-disable-gc", "--benchmark-quiet",
            f"--benchmark-json={raw}", plugin=Turns(cases, turns),
        )  # fmt: skip
        if status != 0:
            sys.exit(f"no report: the timed calls failed (pytest status {status})")
        results = json.loads(raw.read_text())
    entries = [entry["extra_info"] | {"us": entry["stats"]["median"] * 1e6} for entry in results["benchmarks"]]
    return entries, results["machine_info"]


def summarize(entries: Sequence[Row]) -> list[Row]:
    """One row per case: median times, and ratios to the faster eager way with their spread over the turns."""
    rows = []
    for batch, draft_len in dict.fromkeys((entry["batch"], entry["draft_len"]) for entry in entries):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for entry in entries:
            if (entry["batch"], entry["draft_len"]) == (batch, draft_len):
                times[entry["way"]].append(entry["us"])
        row: Row = {"batch": batch, "draft_len": draft_len}
        row |= {f"{way}_us": statistics.median(times[way]) for way in WAYS}
        baseline = min(("eager", "eager_threads"), key=lambda way: row[f"{way}_us"])
        for way in ("out", "allocating"):
            ratios = [slow / fast for slow, fast in zip(times[baseline], times[way], strict=True)]
            row |= {f"{way}_ratio": statistics.median(ratios)}
            row |= {f"{way}_ratio_min": min(ratios), f"{way}_ratio_max": max(ratios)}
        rows.append(row | {"baseline": baseline})
    return rows


def check(rows: Sequence[Row]) -> list[Row]:
    """Every target with what was measured."""
    found = []

    def add(name: str, measured: float, target: float, met: bool) -> None:
        found.append({"target": name, "bound": target, "measured": measured, "met": met})

    by_size = {(row["batch"], row["draft_len"]): row for row in rows}
    for (batch, draft_len), row in by_size.items():
        size = f"B={batch} D={draft_len}"
        if (batch, draft_len) in OUT_TARGETS:
            target = OUT_TARGETS[batch, draft_len]
            add(f"{size} out, times faster, at least", row["out_ratio"], target, row["out_ratio"] >= target)
        ratio = row["allocating_ratio"]
        add(f"{size} allocating, times faster, at least", ratio, ALLOCATING_TARGET, ratio >= ALLOCATING_TARGET)
        if (batch, draft_len) == (1024, 15) and (64, draft_len) in by_size:
            growth = row["out_us"] / by_size[64, draft_len]["out_us"]
            add(f"B=64 to 1024 D={draft_len} out, growth, at most", growth, GROWTH_TARGET, growth <= GROWTH_TARGET)
    return found


def print_report(console: Console, rows: Sequence[Row], targets: Sequence[Row]) -> None:
    table = Table(title="microseconds a call, and how many times faster than the faster eager way")
    for name in ("B", "D", "out", "new", "eager", "eager mt", "eager/out", "spread", "eager/new", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row["batch"]), str(row["draft_len"])]
        cells += [f"{row[f'{way}_us']:.1f}" for way in ("out", "allocating", "eager", "eager_threads")]
        for way in ("out", "allocating"):
            cells += [f"{row[f'{way}_ratio']:.1f}", f"{row[f'{way}_ratio_min']:.1f}-{row[f'{way}_ratio_max']:.1f}"]
        table.add_row(*cells)
    console.print(table)
    console.print(
        "out: into reused buffers; new: new buffers each call; mt: torch with all its threads, the others one"
    )
    for entry in targets:
        if not entry["met"]:
            console.print(f"[red]missed[/red]: {entry['target']} {entry['bound']}: {entry['measured']:.1f}")
    console.print(f"{sum(entry['met'] for entry in targets)} of {len(targets)} targets met")


def save(out: Path, rows: Sequence[Row], targets: Sequence[Row], environment: Row) -> None:
    """Write results.json and results.csv."""
    out.mkdir(parents=True, exist_ok=True)
    results = environment | {"rows": rows, "targets": targets}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", choices=("portable", "avx2", "avx512"), help="default: the best of this machine")
    parser.add_argument("--rounds", type=int, default=9, help="turns of every way of every case (default 9)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench", help="where results go")
    parser.add_argument("--quick", action="store_true", help="one turn, batches up to 64, targets only reported")
    parser.add_argument("--no-gate", action="store_true", help="skip the agreement tests; the results say so")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify, measure, report; the status is 1 if a target that binds is missed."""
    args = parse(arguments)
    if _load.missing("cpu"):
        sys.exit(f"nothing to time: {backends.explain()}")
    isa = _load.cpu_isa(args.isa)
    cases = [case for case in BENCH if not args.quick or case.batch <= 64]
    turns = 1 if args.quick else args.rounds
    if not args.no_gate:
        verify(cases, isa)
    entries, machine = measure(cases, turns)
    rows = summarize(entries)
    targets = check(rows)
    environment = {
        "command": shlex.join(["python", *sys.argv] if arguments is None else ["run.py", *arguments]),
        "cpu": machine["cpu"].get("brand_raw", machine["processor"]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "isa": isa,
        "torch": torch.__version__,
        "python": machine["python_version"],
        "threads": torch.get_num_threads(),
        "rounds": turns,
        "verified": not args.no_gate,
    }
    save(args.out, rows, targets, environment)
    console = Console(width=None if sys.stdout.isatty() else 110)
    print_report(console, rows, targets)
    console.print(f"{environment['cpu']}, {isa}, torch {torch.__version__}; saved {args.out}/results.json and .csv")
    binds = isa != "portable" and not args.quick
    return int(binds and not all(entry["met"] for entry in targets))


if __name__ == "__main__":
    sys.exit(main())
