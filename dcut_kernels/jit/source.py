"""What NVRTC compiles: the kernels of ``step.cuh``, as `csrc/cuda` compiles them with nvcc."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# The fused kernel for each value of enum Storage, in its order, and the parts.
SELECT = tuple(f"dcut::gpu::select_and_pack<dcut::gpu::Storage::{s}>" for s in ("kHeld", "kShared", "kReread"))
PREFIX, TOPK, ARGMAX, PACK = (
    f"dcut::gpu::{name}" for name in ("log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes")
)
KERNELS = (*SELECT, PREFIX, TOPK, ARGMAX, PACK)


def include_dir() -> Path:
    """The folder that holds ``dcut/``: of the installed package, or of the checkout.

    Raises
    ------
    RuntimeError
        If neither has the headers.
    """
    candidates = (_PACKAGE / "include", _PACKAGE.parent / "csrc" / "include")
    found = next((folder for folder in candidates if (folder / "dcut" / "step.cuh").exists()), None)
    if found is None:
        raise RuntimeError(f"include: expected dcut/step.cuh in {' or '.join(map(str, candidates))}, got neither")
    return found


def options() -> tuple[str, ...]:
    """Compiler options; NVRTC has no standard headers, so ``stdint.h`` comes from here."""
    return ("-std=c++17", f"-I{include_dir()}", f"-I{Path(__file__).parent / 'include'}")


def source() -> str:
    """The translation unit.  It names its headers' contents: caches of compiled code look at the text alone."""
    headers = sorted((include_dir() / "dcut").iterdir())
    digest = hashlib.sha256(b"".join(header.read_bytes() for header in headers)).hexdigest()
    return f'#include "dcut/step.cuh"\n// {digest}\n'
