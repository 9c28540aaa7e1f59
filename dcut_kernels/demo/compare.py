"""Are two texts the same, or do they part at a tie that only rounding decides?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Target
from ..sampling import gumbel

TIE = 1e-4  # two logits this close, in float64, are a tie: float32 rounding depends on how a batch is packed


class Comparison(NamedTuple):
    """Texts that are equal, texts that part at a tie, and the indices of texts that really differ."""

    equal: int
    ties: int
    different: list[int]


def compare(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    temperature: float = 0.0,
) -> Comparison:
    """Compare texts with expected ones, token for token.

    Parameters
    ----------
    target : Target
        Rescores in float64 where two texts part.
    prompts, texts, expected : sequence of token sequences
        Prompt, text and expected text of each request; requests have their number as seed.
    temperature : float
        Temperature that the texts were sampled at.
    """
    ties, different = 0, []
    for i, (prompt, text, other) in enumerate(zip(prompts, texts, expected, strict=True)):
        if list(text) == list(other):
            continue
        n = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
        if n is not None and tie_gap(target, [*prompt, *text[:n]], text[n], other[n], temperature, i) <= TIE:
            ties += 1
        else:
            different.append(i)
    return Comparison(len(texts) - ties - len(different), ties, different)


@torch.inference_mode()
def tie_gap(target: Target, context: Sequence[int], a: int, b: int, temperature: float, seed: int) -> float:
    """How far the worse of two next tokens is from the best token, in float64 logits (with noise, if any)."""
    exact = copy.deepcopy(target).double()
    ids = torch.tensor([context])

    def attend(layer: int, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    hidden, _ = exact(ids, torch.arange(len(context)), attend)
    logits = exact.logits(hidden[0, -1])
    if temperature:
        logits = logits / temperature + gumbel(len(logits), seed, len(context))
    best = float(logits.max())
    return best - float(torch.minimum(logits[a], logits[b]))
