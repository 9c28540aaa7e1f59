"""`select_and_pack` with its default options, the obvious way: a chain of torch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from dcut_kernels import VerifyBatch


def select_and_pack(
    confidence: Tensor,  # [B, D]
    draft_ids: Tensor,  # [B, D]
    bonus_ids: Tensor,  # [B]
    seq_lens: Tensor,  # [B]
    budgets: Tensor,  # [R]
    costs: Tensor,  # [R]
    pad_token: int = 0,
) -> VerifyBatch:
    """Equal to the operator but for ties between floats; gains are float32."""
    batch, width = confidence.shape
    capacity, device = batch * (width + 1), confidence.device

    prefix = confidence.log().cumsum(1)  # [B, D]
    ranked, order = prefix.t().reshape(-1).sort(descending=True, stable=True)  # [D * B]: ties by position, then request
    reached = torch.cat((ranked.new_zeros(1), ranked.exp().cumsum(0)))  # [D * B + 1]
    totals = budgets.clamp(batch, capacity)
    gains = reached[totals - batch] + batch
    bucket = int((gains / costs).argmax())
    total = int(totals[bucket])

    keep_lens = torch.bincount(order[: total - batch] % batch, minlength=batch) if batch else order
    mask = torch.arange(width + 1, device=device) <= keep_lens[:, None]  # [B, D + 1]
    row, k = mask.nonzero(as_tuple=True)  # [total]
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(keep_lens + 1, 0, out=cu_seqlens[1:])

    def packed(values: Tensor, tail: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.full((capacity,), tail, dtype=dtype, device=device)
        buffer[:total] = values
        return buffer

    decision = [bucket, total, total, max(total, int(budgets[bucket]))]
    return VerifyBatch(
        keep_lens=keep_lens.int(),
        cu_seqlens=cu_seqlens,
        kv_lens=(seq_lens + keep_lens + 1).int(),
        token_ids=packed(torch.cat((bonus_ids[:, None], draft_ids), 1)[mask], pad_token, draft_ids.dtype),
        positions=packed(seq_lens[row] + k, 0, torch.int64),
        request_ids=packed(row, -1, torch.int32),
        slot_mapping=torch.full((capacity,), -1, device=device),
        draft_index=packed(torch.where(k > 0, row * width + k - 1, -1), -1, torch.int32),
        logits_indices=packed(torch.arange(total, device=device), 0, torch.int32),
        decision=torch.tensor(decision, dtype=torch.int32, device=device),
        gains=gains,
    )
