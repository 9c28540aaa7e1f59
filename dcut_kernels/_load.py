"""Bind every operator namespace to its backend, once, when the package is imported."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from . import _bind, _confidence, _fake, _reference_ops, _schema
from ._check import Sizes
from ._params import Plan

_HERE = Path(__file__).parent
_ISAS = ("portable", "avx2", "avx512")
NAMES = ("reference", "cpu", "cuda", "triton", "simt")
# Which backends the public operators can have on a device type, the preferred one first.
CHOICES = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # torch for AMD GPUs calls its devices, and its dispatch key, CUDA


def _build_info() -> dict[str, str | None]:
    path = _HERE / "_build.json"
    if not path.exists():
        return {
            "library": None,
            "reason": f"{_HERE} was never built; see its CONTRIBUTING.md, or import from elsewhere",
        }
    return json.loads(path.read_text())


def _load_library(build: dict[str, str | None]) -> ctypes.CDLL | None:
    if build["library"] is None:
        return None
    path = _HERE / str(build["library"])
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"dcut_kernels: cannot load {path} with torch {torch.__version__} (needs 2.11 or newer, built against "
            f"{build.get('torch')}): {error}. Reinstall the package for this torch."
        ) from error
    library = ctypes.CDLL(str(path))
    library.dcut_has_cuda.restype = ctypes.c_bool
    return library


class _Lazy:
    """Kernels in a module that is imported when one of them is first called."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module, __package__), name)


BUILD = _build_info()
_libraries = {namespace: _schema.define(namespace) for namespace in _schema.NAMESPACES}
for _namespace, _library in _libraries.items():
    _fake.register(_namespace, _library)
_compiled = _load_library(BUILD)
_PYTHON_KERNELS: dict[str, Any] = {
    "reference": _reference_ops,
    "triton": _Lazy(".triton.ops"),
    "simt": _Lazy("._simt_ops"),
}


def missing(name: str) -> str | None:
    """Why a backend cannot be bound, or None; says nothing of devices."""
    if name == "reference":
        return None
    if name == "triton":
        return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"
    if name == "simt":
        found = any(_HERE.glob("_simt.*so"))
        return None if found else "the emulated CUDA kernel is for tests and only in editable installs with pybind11"
    if _compiled is None:
        return f"the compiled library is not installed: {BUILD.get('reason')}"
    if name == "cuda" and torch.version.hip:
        return "torch is a build for AMD GPUs"
    return None if name == "cpu" or _compiled.dcut_has_cuda() else f"not compiled: {BUILD.get('cuda_reason')}"


def _forced() -> str | None:
    name = os.environ.get("DCUT_BACKEND") or None
    options = sorted({option for choices in CHOICES.values() for option in choices})
    if name is None:
        return None
    if name not in options:
        raise ImportError(f"DCUT_BACKEND: expected {', '.join(options)}, got '{name}'")
    if reason := missing(name):
        raise ImportError(f"DCUT_BACKEND: expected a backend that is available, got '{name}': {reason}")
    return name


FORCED = _forced()


def _choose(device: str) -> str | None:
    if FORCED in CHOICES[device]:
        return FORCED
    automatic = [name for name in CHOICES[device] if device == "cpu" or name != "reference"]
    return next((name for name in automatic if missing(name) is None), None)


CHOSEN = {device: _choose(device) for device in CHOICES}


def _bind_one(namespace: str, key: str, name: str) -> None:
    if name in ("cpu", "cuda"):
        assert _compiled is not None
        _compiled.dcut_bind(namespace.encode(), key.encode())
    else:
        one_launch = name != "reference"
        _bind.register(_libraries[namespace], key, _PYTHON_KERNELS[name], one_launch=one_launch)
    if name != "cpu":
        _confidence.register(_libraries[namespace], key, name)


class _NoKernels:
    """Raises where the public operators have no backend."""

    def __getattr__(self, name: str) -> Any:
        reasons = "; ".join(f"{backend}: {missing(backend)}" for backend in ("cuda", "triton"))
        raise RuntimeError(f"dcut_kernels has no backend for CUDA tensors here ({reasons})")


def _bind_all() -> None:
    _bind.register(_libraries["dcut_reference"], "CompositeExplicitAutograd", _reference_ops, one_launch=False)
    _confidence.register(_libraries["dcut_reference"], "CompositeExplicitAutograd", "reference")
    for key in _KEYS.values():
        _bind_one("dcut_triton", key, "triton")
    _bind_one("dcut_simt", "CPU", "simt")
    for name, key in (("cpu", "CPU"), ("cuda", "CUDA")):
        if missing(name) is None:
            _bind_one(f"dcut_{name}", key, name)
    for device, backend in CHOSEN.items():
        if backend is not None:
            _bind_one("dcut", _KEYS[device], backend)
        else:
            _bind.register(_libraries["dcut"], _KEYS[device], _NoKernels(), one_launch=True)
            _confidence.register(_libraries["dcut"], _KEYS[device], "triton")


_bind_all()
if CHOSEN["cpu"] == "reference" and FORCED is None:
    warnings.warn(
        f"dcut_kernels runs on its reference, which is correct but slow: {BUILD['reason']}",
        RuntimeWarning,
        stacklevel=2,
    )


def cpu_isa(name: str | None = None) -> str:
    """Instruction set of the CPU kernel; with a name, switch to it (for tests and benchmarks)."""
    if _compiled is None:
        raise RuntimeError(f"the compiled library is not loaded: {BUILD.get('reason')}")
    if name is not None and (name not in _ISAS or not _compiled.dcut_cpu_set_isa(_ISAS.index(name))):
        raise RuntimeError(f"name: expected an instruction set of this machine, one of {_ISAS}, got '{name}'")
    return _ISAS[_compiled.dcut_cpu_isa()]


def gpu_plan(operation: int, sizes: Sizes, shared_bytes: int, cluster: int) -> Plan:
    """Launch shape of a GPU kernel, for callers that launch it on their own.

    ``operation``: 0 select_and_pack, 1 log_prefix_sum, 2 segmented_topk and bucket_argmax, 3 pack_prefixes.
    ``shared_bytes``: that a block of the device can ask for.  ``cluster``: blocks of a cluster, 1 before sm_90.
    """
    if _compiled is None:
        raise RuntimeError(f"the compiled library is not loaded: {BUILD.get('reason')}")
    plan = Plan()
    size = (sizes.batch, sizes.draft_len, sizes.buckets)
    _compiled.dcut_gpu_plan(operation, *size, ctypes.c_uint32(shared_bytes), cluster, ctypes.byref(plan))
    return plan
