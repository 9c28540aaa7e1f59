"""A kernel that does nothing: what one node of a CUDA graph costs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def empty_kernel() -> tuple[str, Callable[[], None]]:
    """Return who launches it, CuPy or else Triton, and a function that launches it on torch's current stream."""
    try:
        import cupy
    except ImportError:
        return "triton", _of_triton()
    kernel = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")

    def launch() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (32,), ())

    return "cupy", launch


def _of_triton() -> Callable[[], None]:
    import triton

    @triton.jit
    def empty() -> None:
        pass

    return lambda: empty[(1,)](num_warps=1)
