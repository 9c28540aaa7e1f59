"""Two processes: what they decide without a message, with one from rank 0, and with a sum of gains."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dcut_kernels import _load, backends
from dcut_kernels.cost import CostTable, PaperRatios, TokenCounts
from dcut_kernels.planner import Planner
from python_tests.compare import instruction_sets

WORLD, DRAFT_LEN = 2, 7
STEPS = 10_000
TABLE = CostTable((8,), ((5.0, 8.0, 11.0, 14.0),), PaperRatios((0.25, 0.5, 0.75, 1.0), DRAFT_LEN))

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def run(rank: int, path: str, work: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    torch.save(work(rank), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def both(path: Path, work: Callable[[int], Any]) -> list[Any]:
    """What the two ranks return."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(run, (str(path), work), WORLD)
    return [torch.load(path / f"{rank}.pt") for rank in range(WORLD)]


def tokens(batch: int) -> list[torch.Tensor]:
    return [torch.zeros(batch, DRAFT_LEN, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64),
            torch.arange(batch)]  # fmt: skip


def decide_alone(rank: int) -> list[str]:
    """Hashes of all decisions, every 1000 steps; each rank with an instruction set of its own."""
    if backends.chosen() == "cpu":
        sets = instruction_sets()
        _load.cpu_isa(sets[rank % len(sets)])
    planner = Planner(TABLE, 8, DRAFT_LEN, policy="history", score="shifted")
    noise, sha, hashes = torch.Generator().manual_seed(0), hashlib.sha256(), []
    steps = STEPS if backends.chosen() == "cpu" else 100
    for step in range(steps):
        batch = step % 8 + 1
        confidence = torch.rand(batch, DRAFT_LEN, generator=noise) ** 0.3
        planner.begin(range(batch))
        result = planner.select(confidence, *tokens(batch))
        sha.update(bytes(result.keep_lens.tolist()) + repr(result.decision.tolist()).encode())
        if (step + 1) % (steps // 10) == 0:
            hashes.append(sha.hexdigest())
    assert planner.read_next().calls == steps
    return hashes


def test_equal_confidences_need_no_message(tmp_path: Path) -> None:
    first, second = both(tmp_path, decide_alone)
    assert len(set(first)) == 10
    assert first == second


# One request in two ranks whose sums run in another order: they choose different buckets.
FLOATS = ((0.811, 0.720), (0.810, 0.718))
TWO = CostTable((1,), ((1.0, 1.811, 2.394),), TokenCounts((1, 2, 3)))


def decide_from_other_floats(rank: int) -> list[Any]:
    answers = []
    for authority in ("all", "rank0"):
        planner = Planner(TWO, 1, 2, authority=authority, lookup="exact")
        table = torch.arange(12, dtype=torch.int32).reshape(1, 12)
        planner.begin([0])
        ids = [torch.tensor([[5, 6]]), torch.tensor([4]), torch.tensor([9])]
        batch = planner.select(torch.tensor([FLOATS[rank]]), *ids, block_table=table, block_size=4, pad_token=3)
        answers.append([t.tolist() for t in batch[:-1]])
    return answers


def test_rank_0_decides_where_floats_differ(tmp_path: Path) -> None:
    (alone_0, from_0), (alone_1, from_1) = both(tmp_path, decide_from_other_floats)
    assert alone_0 != alone_1
    assert from_0 == from_1 == alone_0


def agree(rank: int) -> list[Any]:
    """Ranks of different batches: buckets by step, each rank's own and the one agreed on."""
    planner = Planner(TABLE, 8, DRAFT_LEN, policy="history", score="shifted", agree=True)
    noise, budgets, gains, padded, read = torch.Generator().manual_seed(rank), [], [], [], []
    for step in range(200):
        batch = 8 if (step + rank) % 2 else 5
        confidence = torch.rand(batch, DRAFT_LEN, generator=noise) ** (0.2 if rank else 1.5)
        planner.begin(range(batch))
        read.append(planner.read_next().tokens)
        result = planner.select(confidence, *tokens(batch))
        budgets.append(int(result.decision[1]))
        padded.append(int(result.decision[3]))
        gains.append(result.gains.tolist())
    planner._ranks.finish(planner.next_budget)
    return [int(planner.next_budget[0]), budgets, gains, padded, read]


def test_data_parallel_ranks_agree_on_the_next_bucket(tmp_path: Path) -> None:
    (last_0, budgets_0, gains_0, *sizes_0), (last_1, budgets_1, gains_1, *sizes_1) = both(tmp_path, agree)
    raw, costs = (table[-1].tolist() for table in TABLE.dense(8))
    for step in range(1, 201):
        sums = [a + b for a, b in zip(gains_0[step - 1], gains_1[step - 1], strict=True)]
        best = raw[max(range(4), key=lambda r: (sums[r] / costs[r], -r))]
        if step == 200:
            assert last_0 == last_1 == best
            break
        for rank, budget in ((0, budgets_0[step]), (1, budgets_1[step])):
            most = (8 if (step + rank) % 2 else 5) * (DRAFT_LEN + 1)
            assert budget == min(best, most), f"step {step}, rank {rank}: {(budgets_0, budgets_1)[rank][: step + 3]}"
    assert len(set(budgets_0)) > 1
    assert sizes_0[0][1:] == sizes_1[0][1:] == sizes_0[1][1:] == sizes_1[1][1:]  # what they pad to, and what they read


def ask(rank: int) -> list[Any]:
    """Only rank 0 sees gains; the others have to follow its answers."""
    dear = CostTable((8,), ((50.0, 60.0, 70.0, 80.0),), TABLE.rule, plain_ms=(4.0,))
    planner, answers = Planner(dear, 8, DRAFT_LEN, authority="rank0", probe_every=5), []
    for _ in range(20):
        answers.append(planner.should_draft(8))
        if answers[-1]:
            planner.begin(range(8))
            result = planner.select(torch.full((8, DRAFT_LEN), 0.5), *tokens(8))
            planner.observe(range(8), result, [DRAFT_LEN] * 8, [0] * 8)
    return [answers]


def test_all_draft_when_rank_0_does(tmp_path: Path) -> None:
    first, second = both(tmp_path, ask)
    assert first == second
    assert set(first[0]) == {True, False}
