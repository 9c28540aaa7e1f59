"""The CUDA kernels, compiled when they are first called: NVRTC through CuPy, for machines with a GPU and no nvcc.

Importing this module defines the operators ``torch.ops.dcut_jit`` for CUDA tensors; the functions here call them.  The
first call on a GPU compiles for some seconds; CuPy keeps the result for the next process.
"""

from typing import NoReturn

from .. import _bind, _fake, _schema
from ..ops import Backend
from .launch import CupyKernels


class _GpuOnly:
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"dcut_kernels.jit.{name}: expected CUDA tensors, got CPU tensors")


_library = _schema.define("dcut_jit")
_fake.register("dcut_jit", _library)
_bind.register(_library, "CUDA", CupyKernels(), one_launch=True)
_bind.register(_library, "CPU", _GpuOnly(), one_launch=True)

backend = Backend("jit", "dcut_jit")
select_and_pack = backend.select_and_pack
log_prefix_sum = backend.log_prefix_sum
segmented_topk = backend.segmented_topk
bucket_argmax = backend.bucket_argmax
pack_prefixes = backend.pack_prefixes

__all__ = ["backend", "bucket_argmax", "log_prefix_sum", "pack_prefixes", "segmented_topk", "select_and_pack"]
