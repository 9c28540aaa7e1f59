"""Which backend serves which device, and access to each of them."""

from __future__ import annotations

from functools import cache

import torch

from . import _load
from .ops import Backend

_NOT_BUILT = {
    "cuda": "the CUDA kernel is not part of this version",
    "triton": "the Triton kernel is not part of this version",
    "simt": "the emulated CUDA kernel is not part of this version",
}


def _missing(name: str) -> str | None:
    """Why a backend cannot be used, or None."""
    if name == "reference" or (name == "cpu" and _load.has_library()):
        return None
    if name == "cpu":
        return f"the compiled library is not installed: {_load.BUILD.get('reason')}"
    return _NOT_BUILT.get(name)


def available() -> list[str]:
    """Names of the backends that `get` returns."""
    return [name for name in ("reference", "cpu", *_NOT_BUILT) if _missing(name) is None]


@cache
def get(name: str) -> Backend:
    """Return the functions of one backend, whatever the device the public functions would choose.

    Parameters
    ----------
    name : {"reference", "cpu", "cuda", "triton", "simt"}

    Raises
    ------
    RuntimeError
        If there is no such backend, or it is not available here, with the reason.
    """
    if name not in ("reference", "cpu", *_NOT_BUILT):
        raise RuntimeError(f"name: expected reference, cpu, cuda, triton or simt, got '{name}'")
    reason = _missing(name)
    if reason is not None:
        raise RuntimeError(f"backend '{name}' is not available: {reason}")
    return Backend(name, f"dcut_{name}")


def chosen(device: str | torch.device = "cpu") -> str | None:
    """Name of the backend that the public functions use on a device, or None."""
    if torch.device(device).type != "cpu":
        return None
    return "cpu" if _load.has_library() else "reference"


def explain() -> str:
    """Say which backend serves each device type, and why the others were not chosen."""
    cpu = f"cpu ({_load.cpu_isa()})" if _load.has_library() else "reference (Python integers: correct, slow)"
    lines = [f"CPU tensors: {cpu}", "CUDA tensors: none"]
    for name in ("cpu", "reference", *_NOT_BUILT):
        if name == chosen():
            continue
        reason = _missing(name) or "the oracle: the compiled kernel takes the same decisions faster"
        lines.append(f"  not {name}: {reason}")
    return "\n".join(lines)
