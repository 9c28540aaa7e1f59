"""Bind every operator namespace to its backend, once, when the package is imported."""

from __future__ import annotations

import ctypes
import json
import warnings
from pathlib import Path

import torch

from . import _fake, _reference_ops, _schema

_HERE = Path(__file__).parent
_ISAS = ("portable", "avx2", "avx512")


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
    return ctypes.CDLL(str(path))


BUILD = _build_info()
_libraries = {namespace: _schema.define(namespace) for namespace in _schema.NAMESPACES}
for _namespace, _library in _libraries.items():
    _fake.register(_namespace, _library)
_compiled = _load_library(BUILD)
_reference_ops.register(_libraries["dcut_reference"], "CompositeExplicitAutograd")
if _compiled is None:
    _reference_ops.register(_libraries["dcut"], "CPU")
    warnings.warn(
        f"dcut_kernels runs on its reference, which is correct but slow: {BUILD['reason']}",
        RuntimeWarning,
        stacklevel=2,
    )


def has_library() -> bool:
    """Whether the compiled library is loaded."""
    return _compiled is not None


def cpu_isa(name: str | None = None) -> str:
    """Instruction set of the CPU kernel; with a name, switch to it (for tests and benchmarks)."""
    if _compiled is None:
        raise RuntimeError(f"the compiled library is not loaded: {BUILD.get('reason')}")
    if name is not None and (name not in _ISAS or not _compiled.dcut_cpu_set_isa(_ISAS.index(name))):
        raise RuntimeError(f"name: expected an instruction set of this machine, one of {_ISAS}, got '{name}'")
    return _ISAS[_compiled.dcut_cpu_isa()]
