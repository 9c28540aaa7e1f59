"""Sampling from the target: with noise that belongs to a request and a position, or by rejection of sampled drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


class Dice:
    """All randomness of rejection sampling.

    Parameters
    ----------
    seed : int
        Of the generator.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, probs: Tensor) -> Tensor:
        """One token, int64 [...], of each distribution [..., vocab]."""
        flat = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(flat, 1, generator=self.generator).reshape(probs.shape[:-1])

    def decide(self, probs: Tensor) -> Tensor:
        """Whether each of some events [n] of these probabilities happens."""
        return torch.rand(probs.shape, generator=self.generator) < probs


def reject(target: Tensor, draft: Tensor, draft_ids: Tensor, dice: Dice) -> Tensor:
    """Speculative rejection sampling (Leviathan et al., arXiv 2211.17192) of packed rows.

    Parameters
    ----------
    target, draft : Tensor, float32 [n, vocab]
        Distributions of the token after each verified position, by target and drafter.
    draft_ids : Tensor, int64 [n]
        The draft token there, drawn from `draft`; -1 after the last kept one of a row.
    dice : Dice

    Returns
    -------
    Tensor, int64 [n]
        Draft tokens that were accepted, and in each row at the first other place a token that makes the distribution
        that of the target; -1 behind it.
    """
    has = draft_ids >= 0
    chosen = draft_ids.clamp(min=0)[:, None]
    ratio = target.gather(1, chosen)[:, 0] / draft.gather(1, chosen)[:, 0]
    accepted = has & dice.decide(torch.where(has, ratio, 0.0).clamp(max=1.0))
    row, failures = (F.pad((~ok).cumsum(0), (1, 0))[:-1] for ok in (has, accepted))  # counted ahead of each place
    last = (~accepted & (failures == failures[torch.searchsorted(row, row)])).nonzero()[:, 0]
    rest = torch.where(has[last, None], (target[last] - draft[last]).clamp(min=0.0), target[last])
    tokens = torch.where(accepted, draft_ids, -1)
    tokens[last] = dice.draw(rest / rest.sum(-1, keepdim=True))
    return tokens
