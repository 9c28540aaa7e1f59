"""No call keeps memory: an engine makes millions of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcut_kernels
from dcut_kernels import VerifyBatch, backends

ROOT = Path(__file__).resolve().parents[1]
STATM = Path("/proc/self/statm")
PAGE = 4096
CALLS = 10_000
pytestmark = [
    pytest.mark.skipif(not STATM.exists(), reason="needs /proc/self/statm"),
    pytest.mark.skipif(backends.chosen() != "cpu", reason="the reference has nothing of its own to free"),
]


def resident() -> int:
    return int(STATM.read_text().split()[1]) * PAGE


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CONFIDENCE, COSTS, BUDGETS = torch.rand(2, 3), torch.ones(2), int32(4, 6)
TOKENS = {"draft_ids": torch.ones(2, 3, dtype=torch.int32), "bonus_ids": int32(1, 2), "seq_lens": int32(7, 8)}
STEP = TOKENS | {"confidence": CONFIDENCE, "budgets": BUDGETS, "costs": COSTS}
OPTIONS = {"draft_lens": int32(1, 3), "num_reqs": int32(2), "capacity": 8, "score": "shifted", "budget": 5}
PREFIX = dcut_kernels.log_prefix_sum(CONFIDENCE)
OUT = VerifyBatch.allocate(2, 3, 2)


def refused() -> None:
    with contextlib.suppress(RuntimeError):
        dcut_kernels.select_and_pack(**STEP | {"costs": torch.ones(3)}, draft_lens=int32(1, 3), score="shifted")


CALLED = {
    "out": lambda: dcut_kernels.select_and_pack(**STEP, out=OUT),
    "new": lambda: dcut_kernels.select_and_pack(**STEP, **OPTIONS),
    "log_prefix_sum": lambda: dcut_kernels.log_prefix_sum(CONFIDENCE, row_index=int32(0, 1)),
    "segmented_topk": lambda: dcut_kernels.segmented_topk(PREFIX, BUDGETS, draft_lens=int32(1, 3)),
    "bucket_argmax": lambda: dcut_kernels.bucket_argmax(PREFIX, BUDGETS, COSTS, budget=5),
    "pack_prefixes": lambda: dcut_kernels.pack_prefixes(int32(1, 2), **TOKENS, capacity=8),
    "refused": refused,
}


def growth(name: str) -> float:
    """Bytes a call keeps once everything is warm, the least of three rounds: heaps also grow for other reasons."""
    rounds = []
    for _ in range(4):
        before = resident()
        for _ in range(CALLS):
            CALLED[name]()
        rounds.append((resident() - before) / CALLS)
    return min(rounds[1:])


@pytest.mark.parametrize("name", CALLED)
def test_no_call_keeps_memory(name: str) -> None:
    """In a process of its own, whose heap has no holes to fill; the smallest thing to leak has 16 bytes."""
    script = f"from python_tests.test_memory import growth; print(growth({name!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 8
