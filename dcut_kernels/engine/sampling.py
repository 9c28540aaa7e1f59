"""Sampling from the target, with noise that belongs to a request and a position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: float, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Tokens, int64 [n], drawn from logits [n, vocab].

    The Gumbel noise of a token depends on the seed of its request and on its position alone, so the text does not
    depend on how it was drafted, batched or packed.  Temperature 0 is greedy; `seeds` and `positions`, one for each
    token, are those of its request and of itself.
    """
    if temperature == 0:
        return logits.argmax(-1)
    pairs = zip(seeds, positions, strict=True)
    noise = torch.stack([gumbel(logits.shape[-1], seed, position) for seed, position in pairs])
    return (logits / temperature + noise).argmax(-1)


def gumbel(vocab_size: int, seed: int, position: int) -> Tensor:
    """Gumbel noise, float32 [vocab], of one token."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    return torch.empty(vocab_size).exponential_(generator=generator).log_().neg_()
