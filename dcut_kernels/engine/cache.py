"""A paged KV cache, and attention that reads it through a block table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Attend, Config

WIDTHS = (0, 8, 1 << 30)  # rows with few queries attend together, and prompts: a call more costs more than padding


class Rows(NamedTuple):
    """Rows that attend in one call: ``g`` rows, up to ``w`` queries each, ``m`` cache blocks each."""

    queries: Tensor  # int64 [g * w], packed index of each query; the row's last one repeats as padding
    real: Tensor  # int64 [n], places among those that are no padding
    tokens: Tensor  # int64 [n], their packed indices
    blocks: Tensor  # int64 [g * m]
    mask: Tensor  # float32 [g, 1, heads_per_kv * w, m * block_size], 0 or -inf


class PagedCache:
    """Keys and values of all layers of one model, in blocks that requests own."""

    def __init__(self, config: Config, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        entry = (2, self.kv_heads, self.head_dim)  # keys, values
        self.layers = torch.zeros(config.num_hidden_layers, blocks * block_size, *entry)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at slots [tokens]."""
        self.layers[layer].index_copy_(0, slots, torch.stack([keys, values], 1))

    def rows(self, cu_seqlens: Tensor, kv_lens: Tensor, block_table: Tensor, causal: bool) -> list[Rows]:
        """Who attends to what: row ``i`` has queries ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``, its last positions.

        Not causal: every query of a row sees all its ``kv_lens[i]`` positions.
        """
        counts, groups = cu_seqlens.diff(), []
        for low, high in pairwise(WIDTHS):
            chosen = ((counts > low) & (counts <= high)).nonzero()[:, 0]
            if len(chosen):
                groups.append(
                    self._group(cu_seqlens[chosen], counts[chosen], kv_lens[chosen], block_table[chosen], causal)
                )
        return groups

    def _group(self, starts: Tensor, counts: Tensor, kv_lens: Tensor, block_table: Tensor, causal: bool) -> Rows:
        step = torch.arange(int(counts.max()))
        place = torch.minimum(step, counts[:, None] - 1)  # [g, w], of each query in its row
        queries = starts[:, None] + place
        real = (step < counts[:, None]).flatten().nonzero()[:, 0]
        blocks = block_table[:, : -(-int(kv_lens.max()) // self.block_size)].long()  # [g, m]
        ends = (kv_lens - counts)[:, None] + place + 1 if causal else kv_lens[:, None].expand(place.shape)
        hidden = torch.arange(blocks.shape[1] * self.block_size) >= ends[:, :, None]  # [g, w, m * block_size]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return Rows(
            queries.flatten(),
            real,
            queries.flatten()[real],
            blocks.flatten(),
            mask[:, None].repeat(1, 1, self.heads_per_kv, 1),
        )

    def attention(self, slots: Tensor, rows: Sequence[Rows]) -> Attend:
        """Attention of a packed batch: stores its keys and values at `slots`, then reads each row's own cache."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            shape = queries.shape
            queries, keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (queries, keys, values))
            self.write(layer, slots, keys, values)
            mixed = torch.empty_like(queries)
            for group in rows:
                mixed.index_copy_(0, group.tokens, self._read(layer, queries, group))
            return mixed.view(shape)

        return attend

    def _read(self, layer: int, queries: Tensor, rows: Rows) -> Tensor:
        count, width = rows.mask.shape[0], rows.mask.shape[2] // self.heads_per_kv
        # heads that share keys become further queries: [g, kv_heads, heads_per_kv * w, head_dim]
        q = queries.index_select(0, rows.queries).view(count, width, self.kv_heads, self.heads_per_kv, self.head_dim)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        blocks = self.layers[layer].view(-1, self.block_size * 2 * self.kv_heads * self.head_dim)
        cached = blocks.index_select(0, rows.blocks).view(count, -1, 2, self.kv_heads, self.head_dim)
        k, v = cached.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.mask)
        mixed = mixed.unflatten(2, (self.heads_per_kv, width)).permute(0, 3, 1, 2, 4).reshape(-1, *queries.shape[1:])
        return mixed.index_select(0, rows.real)
