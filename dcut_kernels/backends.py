"""Which backend serves which device, and access to each of them."""

from __future__ import annotations

from functools import cache

import torch

from . import _load
from .ops import Backend

_PREFERRED = {
    "reference": "the oracle: the compiled kernel takes the same decisions faster",
    "triton": "the CUDA kernel takes the same decisions with less work on the host",
    "simt": "the CUDA kernel executed on the CPU, for tests",
}
_NO_DEVICE = "there is no CUDA device"


def _missing(name: str) -> str | None:
    """Why a backend cannot be used, or None."""
    if reason := _load.missing(name):
        return reason
    return _NO_DEVICE if name == "cuda" and not torch.cuda.is_available() else None


def available() -> list[str]:
    """Names of the backends that `get` returns."""
    return [name for name in _load.NAMES if _missing(name) is None]


@cache
def get(name: str) -> Backend:
    """Return the functions of one backend, whatever the device the public functions would choose.

    Parameters
    ----------
    name : {"reference", "cpu", "cuda", "triton", "simt"}
        "reference" takes tensors of any device, "triton" those of a GPU and, in Triton's interpreter, of the CPU.

    Raises
    ------
    RuntimeError
        If there is no such backend, or it is not available here, with the reason.
    """
    if name not in _load.NAMES:
        raise RuntimeError(f"name: expected reference, cpu, cuda, triton or simt, got '{name}'")
    reason = _missing(name)
    if reason is not None:
        raise RuntimeError(f"backend '{name}' is not available: {reason}")
    return Backend(name, f"dcut_{name}")


def chosen(device: str | torch.device = "cpu") -> str | None:
    """Name of the backend that the public functions use on a device, or None.

    The environment variable ``DCUT_BACKEND``, read at import, forces the choice where that backend serves the device.
    """
    return _load.CHOSEN.get(torch.device(device).type)


def explain() -> str:
    """Say which backend serves each device type, and why the others were not chosen."""
    lines = []
    for device, choices in _load.CHOICES.items():
        choice = _load.CHOSEN[device]
        detail = f" ({_load.cpu_isa()})" if choice == "cpu" else ""
        forced = ", forced by DCUT_BACKEND" if choice is not None and choice == _load.FORCED else ""
        slow = " (Python integers: correct, slow)" if choice == "reference" else ""
        served = f"{choice or 'none'}{detail}{slow}{forced}"
        if choice is not None and device == "cuda" and not torch.cuda.is_available():
            served = f"none, as {_NO_DEVICE}; one would be served by {served}"
        lines.append(f"{device.upper()} tensors: {served}")
        for name in choices:
            if name != choice:
                reason = _load.missing(name) or (forced and "DCUT_BACKEND names another") or _PREFERRED[name]
                lines.append(f"  not {name}: {reason}")
    lines.append(f"For tests: simt {'available' if _missing('simt') is None else 'not available'}")
    return "\n".join(lines)
