"""Cases on a GPU: inputs, poisoned buffers, results, CUDA graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dcut_kernels import VerifyBatch
from microbench.cases import Case
from python_tests import compare

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def to_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of the arguments with every tensor on a device, or in pinned memory if the host is to read it."""
    moved = {name: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    if "host_budget" in inputs and device.type == "cuda":
        moved["host_budget"] = inputs["host_budget"].pin_memory()
    return moved


def to_host(batch: VerifyBatch) -> VerifyBatch:
    return VerifyBatch._make(t.cpu() for t in batch)


def poisoned(case: Case, device: torch.device) -> VerifyBatch:
    """As `compare.poisoned`, on a device: each buffer lies inside a larger one full of a value no result holds."""
    margin = compare.MARGIN
    bases = (t._base for t in compare.poisoned(case))
    return VerifyBatch._make(base.to(device)[margin:-margin] for base in bases if base is not None)


def capture(function: Callable[[], Any], times: int = 1) -> torch.cuda.CUDAGraph:
    """Capture some calls into one graph, after a call that compiles and loads what is needed."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(times):
            function()
    graph.instantiate()
    return graph


def node_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """The driver's type of every node of a captured graph."""
    driver = ctypes.CDLL("libcuda.so.1")  # loaded already: torch has a context
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if status := driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        raise RuntimeError(f"cuGraphGetNodes: error {status}")
    nodes, types = (ctypes.c_void_p * count.value)(), []
    driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    for node in nodes:
        kind = ctypes.c_int()
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        types.append(kind.value)
    return types


def labeled(label: str, difference: str | None) -> Iterator[str]:
    """A difference, if there is one, with what was compared in front."""
    if difference is not None:
        yield f"{label} {difference}"
