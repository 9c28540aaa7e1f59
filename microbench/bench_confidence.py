"""Time `draft_confidence` on the CPU against softmaxes of torch: a table and ``confidence.json``.

Two jobs: the most likely token and its log-probability, against ``log_softmax``, ``argmax`` and ``gather``; its
probability, against ``softmax().max()``.  All ways take turns in one process, and a ratio is that of neighbors in time.
Nothing is reported unless the answers agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # the repository instead of this folder

import dcut_kernels  # noqa: E402
from dcut_kernels import _load, backends  # noqa: E402

VOCABS = (32_000, 152_000)
BATCHES = (1, 8, 32)
DRAFT_LEN = 15
TARGET = 2.0  # times faster
SECONDS = 0.02  # calls are repeated until a round takes about this long

Job = tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], tuple[Tensor, Tensor]]]


def by_log_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.argmax(-1)
    return ids, logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[..., None])[..., 0]


def by_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.softmax(-1, dtype=torch.float32).max(-1)
    return ids, values


def log_prob(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, values = dcut_kernels.draft_confidence(logits)
    return ids, values[0]


def max_prob(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, values = dcut_kernels.draft_confidence(logits, statistics=("max_prob",))
    return ids, values[0]


JOBS: dict[str, Job] = {"log_prob": (by_log_softmax, log_prob), "max_prob": (by_softmax, max_prob)}


def verify(logits: Tensor, job: Job) -> None:
    """Exit unless both ways give the same."""
    (slow_ids, slow), (fast_ids, fast) = (way(logits) for way in job)
    of_token = logits.gather(-1, slow_ids[..., None]) == logits.gather(-1, fast_ids[..., None])
    if not bool(of_token.all()) or not torch.allclose(slow, fast, rtol=1e-4, atol=1e-5):
        sys.exit(f"no report: the answers differ by up to {(slow - fast).abs().max()}")


def milliseconds(way: Callable[[Tensor], object], logits: Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        way(logits)
    return (time.perf_counter() - start) / calls * 1e3


def measure(logits: Tensor, job: Job, rounds: int) -> dict[str, float]:
    """Median times of both ways, and the median and spread of the ratio of neighbors."""
    verify(logits, job)
    calls = max(1, round(SECONDS * 1e3 / milliseconds(job[0], logits, 1)))
    times = [[milliseconds(way, logits, calls) for way in job] for _ in range(rounds)]
    ratios = [slow / fast for slow, fast in times]
    torch_ms, ms = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "torch_ms": torch_ms,
        "ms": ms,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", choices=("portable", "avx2", "avx512"), help="default: the best of this machine")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both ways (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of both ways (default 9)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench", help="where the results go")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; the status is 1 if a ratio misses the target."""
    args = parse(arguments)
    if _load.missing("cpu"):
        sys.exit(f"nothing to time: {backends.explain()}")
    isa = _load.cpu_isa(args.isa)
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for vocab in VOCABS:
            for batch in BATCHES:
                logits = (torch.randn(batch, DRAFT_LEN, vocab, generator=generator) * 3).to(dtype)
                for name, job in JOBS.items():
                    size = {"dtype": str(dtype).removeprefix("torch."), "vocab": vocab, "batch": batch, "job": name}
                    rows.append(size | measure(logits, job, args.rounds))
    environment = {
        "isa": isa, "threads": args.threads, "rounds": args.rounds, "torch": torch.__version__,
        "cores": os.cpu_count(), "load_average": os.getloadavg(),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    results = environment | {"rows": rows}
    (args.out / "confidence.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = Table(title=f"milliseconds a call for D={DRAFT_LEN}, and how many times faster than torch")
    for name in ("dtype", "V", "B", "job", "torch", "dcut", "ratio", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        spread = f"{row['ratio_min']:.1f}-{row['ratio_max']:.1f}"
        numbers = (f"{row['torch_ms']:.2f}", f"{row['ms']:.2f}", f"{row['ratio']:.1f}", spread)
        table.add_row(row["dtype"], str(row["vocab"]), str(row["batch"]), row["job"], *numbers)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    missed = [row for row in rows if row["ratio"] < TARGET]
    console.print(
        f"{len(rows) - len(missed)} of {len(rows)} are at least {TARGET} times faster; {isa}, {args.threads} threads"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
