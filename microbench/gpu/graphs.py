"""Captured calls against the CPU: one kernel node, and replays that answer as fresh calls do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from dcut_kernels.cost import CostTable, PaperRatios
from dcut_kernels.ops import Backend
from dcut_kernels.planner import Planner
from microbench.cases import Case, bench_case
from microbench.gpu.device import KERNEL_NODE, capture, labeled, node_types, poisoned, to_device, to_host
from python_tests.compare import first_difference, spilled, tensor_difference

PLANNED = (64, 15)


def changed(case: Case, seed: int) -> dict[str, Any]:
    """Other values for the tensors of a case, of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {name: v for name, v in case.inputs.items() if isinstance(v, torch.Tensor)}
    score = values["confidence"]
    values["confidence"] = torch.rand(score.shape, generator=generator).sqrt().to(score.dtype)
    values["num_reqs"] = torch.randint(0, case.batch + 1, (1,), generator=generator, dtype=torch.int32)
    for name in ("draft_ids", "bonus_ids"):
        values[name] = torch.randint(0, 1000, values[name].shape, generator=generator).to(values[name].dtype)
    return values


def replays(case: Case, backend: Backend, oracle: Backend, device: torch.device) -> Iterator[str]:
    """One captured call: its nodes, and what replays answer when inputs and the batch size change."""
    inputs, out = to_device(case.inputs, device), poisoned(case, device)
    graph = capture(lambda: backend.select_and_pack(**inputs, out=out))
    types = node_types(graph)
    if types != [KERNEL_NODE]:
        yield f"expected one kernel node in the graph, got nodes of types {types}"
    for seed in range(6):
        values = changed(case, seed)
        expected = oracle.select_and_pack(**(case.inputs | values), out=poisoned(case, torch.device("cpu")))
        for name, value in values.items():
            inputs[name].copy_(value)
        for buffer, fresh in zip(out, poisoned(case, device), strict=True):
            buffer.copy_(fresh)
        graph.replay()
        yield from labeled(f"replay {seed}", first_difference(to_host(out), expected) or spilled(out))


def history(case: Case, backend: Backend, oracle: Backend, device: torch.device) -> Iterator[str]:
    """One captured step that reads the budget which its last replay chose; the host reads each without a copy."""
    inputs = to_device(case.inputs, device)
    chosen = torch.zeros(2, dtype=torch.int32, device=device)
    word = torch.zeros(1, dtype=torch.int64).pin_memory()
    options = {"policy": "history", "score": "shifted", "next_budget": chosen, "host_budget": word}
    out = poisoned(case, device)
    graph = capture(lambda: backend.select_and_pack(**inputs | options, budget=chosen[:1], out=out))
    types = node_types(graph)
    if types != [KERNEL_NODE]:
        yield f"expected one kernel node in the graph, got nodes of types {types}"
    torch.cuda.synchronize(device)
    mirror, host = chosen.cpu().clone(), word.clone()
    for seed in range(20):
        values = changed(case, seed)
        for name, value in values.items():
            inputs[name].copy_(value)
        here = case.inputs | values | options | {"budget": mirror[:1].clone(), "next_budget": mirror}
        expected = oracle.select_and_pack(**here | {"host_budget": host}, out=poisoned(case, torch.device("cpu")))
        graph.replay()
        torch.cuda.synchronize(device)
        yield from labeled(f"replay {seed}", first_difference(to_host(out), expected))
        yield from labeled(f"replay {seed}", tensor_difference("next_budget", chosen.cpu(), mirror))
        yield from labeled(f"replay {seed}", tensor_difference("host_budget", word, host))


def planned(
    policy: Literal["argmax", "early_stop", "history"], backend: Backend, oracle: Backend, device: torch.device
) -> Iterator[str]:
    """A planner whose captured step is replayed, next to one on the CPU, with floors, priorities and prompts."""
    batch, depth = PLANNED
    given, names = bench_case(batch, depth).inputs, ("confidence", "draft_ids", "bonus_ids", "seq_lens")
    inputs = {name: given[name] for name in names}
    rule = PaperRatios((0.25, 0.5, 0.75, 1.0), depth)
    table = CostTable((1, batch), ((4.0, 4.1, 4.2, 4.3), (9.0, 12.0, 18.0, 28.0)), rule)
    here, there = (
        Planner(
            table, batch, depth, policy=policy, score="shifted", allow_biased=True, priorities=True, floor_every=3,
            ids=inputs["draft_ids"].dtype, backend=each, device=place,
        )
        for each, place in ((oracle, "cpu"), (backend, device))
    )  # fmt: skip
    for planner in (here, there):
        for request in range(batch):
            planner.join(request, 0.5 + request % 3)
        planner.begin(range(batch))
    moved = to_device(inputs, device)
    results = []
    graph = capture(lambda: results.append(there.select(**moved)))
    here.select(**inputs)
    yield from labeled("nodes", None if node_types(graph) == [KERNEL_NODE] else str(node_types(graph)))
    for step in range(12):
        inputs["confidence"] = torch.rand(batch, depth, generator=torch.Generator().manual_seed(step)) ** (1 + step % 4)
        moved["confidence"].copy_(inputs["confidence"])
        requests = [(row * 5 + step) % batch for row in range(batch)]
        for planner in (here, there):
            planner.begin(requests, batch + 40 * (step % 2))
        graph.replay()
        torch.cuda.synchronize(device)
        yield from labeled(f"replay {step}", first_difference(to_host(results[-1]), here.select(**inputs)))
        yield from labeled(
            f"replay {step}", tensor_difference("next_budget", there.next_budget.cpu(), here.next_budget)
        )
        if there.read_next() != here.read_next():
            yield f"replay {step} expected the host to read {here.read_next()}, got {there.read_next()}"
