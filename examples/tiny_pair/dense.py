"""Dense attention for training and evaluation: whole sequences, and many draft blocks of a sequence at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dcut_kernels.models import Drafter, Target


def scaled(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention; [batch, length, heads, head_dim] in and out, mask [batch or 1, queries, keys].

    Plain products: on a CPU their backward pass is several times faster than that of the fused operator.
    """
    groups = keys.shape[2]
    q = queries.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [batch, groups, heads * queries, dim]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    scores = scores.unflatten(2, (-1, queries.shape[1])).float().masked_fill(~mask[:, None, None], -1e9)
    mixed = scores.softmax(-1).to(v.dtype).flatten(2, 3) @ v
    return mixed.unflatten(2, (-1, queries.shape[1])).flatten(1, 2).transpose(1, 2)


def causal(length: int) -> Tensor:
    """Mask [1, length, length] of a whole sequence."""
    return torch.ones(1, length, length, dtype=torch.bool).tril()


def run_target(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Final hidden states and features of whole sequences [batch, length]."""
    mask = causal(ids.shape[1])
    return target(ids, torch.arange(ids.shape[1]), lambda layer, q, k, v: scaled(q, k, v, mask))


@torch.inference_mode()
def greedy(target: Target, prompts: Tensor, tokens: int) -> Tensor:
    """Greedy continuations: [batch, P] to [batch, P + tokens]."""
    batch, start = prompts.shape
    heads, kv_heads, dim = (
        getattr(target.config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    cache = torch.zeros(target.config.num_hidden_layers, 2, batch, kv_heads, start + tokens, dim)
    ids = torch.cat([prompts, torch.zeros(batch, tokens, dtype=torch.int64)], 1)
    first = 0
    for length in range(start, start + tokens):

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, first: int = first, length: int = length) -> Tensor:
            cache[layer, 0, :, :, first:length] = k.transpose(1, 2)
            cache[layer, 1, :, :, first:length] = v.transpose(1, 2)
            if first == 0:
                return scaled(q, k, v, causal(length))
            keys, values = cache[layer, :, :, :, :length]
            weights = (q.view(batch, kv_heads, -1, dim) * dim**-0.5 @ keys.transpose(2, 3)).softmax(-1)
            return (weights @ values).view(batch, 1, heads, dim)

        hidden, _ = target(ids[:, first:length], torch.arange(first, length), attend)
        ids[:, length] = target.logits(hidden[:, -1]).argmax(-1)
        first = length
    return ids


def draft_logits(drafter: Drafter, target: Target, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Draft logits [batch, M, D, vocab] after each bonus token.

    Parameters
    ----------
    ids, features : Tensor [batch, length], [batch, length, layers * hidden]
        Sequences and the target's features of them.
    anchors : Tensor, int64 [batch, M]
        Positions of the bonus tokens; features from there on are not looked at.
    """
    (batch, length), block = ids.shape, drafter.draft_len + 1
    rows = anchors.shape[1] * block
    context = drafter.context(features, torch.arange(length))
    of_block = torch.arange(anchors.shape[1]).repeat_interleave(block)
    sees_context = torch.arange(length) < anchors.repeat_interleave(block, 1)[:, :, None]
    sees_block = (of_block[:, None] == of_block).expand(batch, rows, rows)
    mask = torch.cat([sees_context, sees_block], 2)

    def attend(layer: int, *new: Tensor) -> Tensor:
        q, k, v = (x.flatten(1, 2) for x in new)
        keys, values = (torch.cat(pair, 1) for pair in zip(context[layer], (k, v), strict=True))
        return scaled(q, keys, values, mask).view(new[0].shape)

    bonus = target.embed_tokens(ids.gather(1, anchors)).detach()
    return F.linear(drafter(bonus, anchors, attend), target.embed_tokens.weight.detach())


def labels(ids: Tensor, anchors: Tensor, draft_len: int) -> Tensor:
    """Tokens [batch, M, D] that follow each bonus token."""
    places = anchors[:, :, None] + 1 + torch.arange(draft_len)
    return ids.gather(1, places.flatten(1)).view(places.shape)
