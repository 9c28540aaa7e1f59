"""The result of a step, and its buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._check import IDS, INT32_MAX, Sizes, fail, out_shapes, resolve_capacity
from ._schema import MAX_BUCKETS, MAX_DRAFT_LEN


class VerifyBatch(NamedTuple):
    """One step's verification batch: which draft tokens are verified, packed without gaps.

    ``B`` is the batch, ``N`` the capacity of the packed buffers, ``R`` the number of buckets.  The total number of
    tokens is ``decision[2]``; every packed buffer is written up to its capacity, except for base tokens before the
    bonus (see ``base_lens``), which are the engine's.

    Attributes
    ----------
    keep_lens : Tensor, int32 [B]
        Draft tokens kept per request; 0 for padding rows.
    cu_seqlens : Tensor, int32 [B + 1]
        Token offsets of the requests, flat at the total after the last active row.
    kv_lens : Tensor, int32 [B]
        ``seq_lens + keep_lens + 1``; 0 for padding rows.
    token_ids : Tensor, dtype of draft_ids, [N]
        Bonus token and kept draft tokens of each request; ``pad_token`` in the tail.
    positions : Tensor, int64 [N]
        Position of each token in its sequence; 0 in the tail.
    request_ids : Tensor, int32 [N]
        Row of each token; -1 in the tail.
    slot_mapping : Tensor, int64 [N]
        KV-cache slot of each token; -1 in the tail, without a block table, and outside it.
    draft_index : Tensor, int32 [N]
        Flat index into the ``[slots, D]`` draft tables; -1 for bonus tokens and in the tail.
    logits_indices : Tensor, int32 [N]
        Packed indices of the verified positions, row by row, ``keep_lens + 1`` for each active row; 0 in the tail, so
        a captured gather stays valid.
    decision : Tensor, int32 [4]
        Chosen bucket (-1 with a given budget or when every bucket is disabled), clamped budget, total (the same
        number), padded total: the larger of the total and the bucket's budget as listed, or with a given budget the
        smallest listed one that holds the total.
    gains : Tensor, int64 [R]
        Expected tokens of every bucket in units of 2^-30.
    """

    keep_lens: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor
    token_ids: Tensor
    positions: Tensor
    request_ids: Tensor
    slot_mapping: Tensor
    draft_index: Tensor
    logits_indices: Tensor
    decision: Tensor
    gains: Tensor

    @classmethod
    def allocate(
        cls,
        batch: int,
        draft_len: int,
        buckets: int,
        capacity: int | None = None,
        ids_dtype: torch.dtype = torch.int32,
        device: torch.device | str = "cpu",
    ) -> VerifyBatch:
        """Allocate buffers to be reused as ``out`` by every step.

        Parameters
        ----------
        batch, draft_len, buckets : int
            ``B``, ``D`` and ``R`` of the calls that will write here.
        capacity : int, optional
            Size of the packed buffers, at least ``batch``; ``batch * (draft_len + 1)`` by default.
        ids_dtype : torch.dtype
            int32 or int64, as ``draft_ids``.
        device : torch.device or str
            Where the buffers live.
        """
        limits = {
            "batch": (batch, INT32_MAX),
            "draft_len": (draft_len, MAX_DRAFT_LEN),
            "buckets": (buckets, MAX_BUCKETS),
        }
        for name, (size, most) in limits.items():
            if not isinstance(size, int | torch.SymInt) or not 0 <= size <= most:
                fail(name, f"an int from 0 to {most}", repr(size))
        if ids_dtype not in IDS:
            fail("ids_dtype", "torch.int32 or torch.int64", ids_dtype)
        capacity = resolve_capacity(capacity, batch, draft_len, has_base=False)
        shapes = out_shapes(Sizes(batch, batch, draft_len, buckets, capacity), ids_dtype).values()
        return cls(*(torch.zeros(dims, dtype=dtype, device=device) for dtype, dims in shapes))
