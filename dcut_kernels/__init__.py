"""Draft-token selection and packing for batched speculative decoding (D-cut, arXiv 2607.14647)."""

from . import backends
from .batch import VerifyBatch
from .ops import Backend, DraftConfidence

__version__ = "0.1.0"

_public = Backend("public", "dcut")
select_and_pack = _public.select_and_pack
log_prefix_sum = _public.log_prefix_sum
segmented_topk = _public.segmented_topk
bucket_argmax = _public.bucket_argmax
pack_prefixes = _public.pack_prefixes
draft_confidence = _public.draft_confidence

__all__ = [
    "DraftConfidence",
    "VerifyBatch",
    "backends",
    "bucket_argmax",
    "draft_confidence",
    "log_prefix_sum",
    "pack_prefixes",
    "segmented_topk",
    "select_and_pack",
]
