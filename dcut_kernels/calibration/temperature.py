"""Sequential temperature scaling: one temperature per draft position, fitted offline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._values import positive, tensor

RANGE = 16.0  # temperatures are searched from 1 / 16 to 16
POINTS = 17  # per scan; each of them narrows the bracket by 8
SCANS = 5
SMALLEST = 2.0**-20  # of -log(confidence): bounds what one rejection at full confidence costs
LARGEST = 64.0
LARGEST_LOGIT = 1e37  # divided by the smallest temperature it still is a float32


class DraftLogits(NamedTuple):
    """Recorded drafts whose verification is known.

    Attributes
    ----------
    logits : Tensor, float [N, D, V]
        Drafter's logits; -inf excludes a token.  Where `mask` is True there is no NaN, and the largest of a draft is
        within 1e37 of 0.
    draft_ids : Tensor, int32 or int64 [N, D]
        Draft tokens.
    accepted : Tensor, bool [N, D]
        Whether the draft was accepted.
    mask : Tensor, bool [N, D]
        Where that is known: up to and including the first rejected draft, as in `feedback`.
    """

    logits: Tensor
    draft_ids: Tensor
    accepted: Tensor
    mask: Tensor


def fit_temperatures(recorded: DraftLogits | Iterable[DraftLogits], *, strength: float = 1.0) -> Tensor:
    r"""Fit the temperature of each draft position on the drafts that reached it.

    Position ``k`` gets the :math:`T_k` that minimizes the negative log-likelihood of acceptance with confidences
    :math:`c = \mathrm{softmax}(\mathrm{logits} / T_k)` of the draft token, plus ``strength / 2`` times the square of
    :math:`\ln T_k`.  The whole range is scanned, then ever smaller brackets around the best point, so the result does
    not depend on a starting point; it is within one part in 10^4.

    Parameters
    ----------
    recorded : DraftLogits or iterable of DraftLogits
        Recorded drafts, in batches if they are many; batches are iterated over five times.
    strength : float
        Strength of the prior around 1, above 0.

    Returns
    -------
    Tensor, float32 [D]
        Temperatures from 1/16 to 16; 1 where nothing was verified.  Divide logits by them before the softmax.

    Raises
    ------
    ValueError
        If shapes, dtypes or logits differ from these, or the batches can be iterated over only once.
    """
    positive("strength", strength)
    batches = [recorded] if isinstance(recorded, DraftLogits) else recorded
    if isinstance(batches, Iterator):
        raise ValueError(f"recorded: expected batches that can be iterated over again, got {type(recorded).__name__}")
    draft_len = _draft_len(batches)
    high = torch.full((draft_len,), math.log(RANGE), dtype=torch.float64)
    low = -high
    for _ in range(SCANS):
        points = low + (high - low) * torch.linspace(0, 1, POINTS, dtype=torch.float64)[:, None]  # ln T, [17, D]
        cost = strength / 2 * points.square()
        for batch in batches:
            for cost_row, temperature in zip(cost, points.exp(), strict=True):
                cost_row += _nll(batch, temperature).cpu()
        best = cost.argmin(0, keepdim=True)
        low, high = (points.gather(0, (best + by).clamp(0, POINTS - 1))[0] for by in (-1, 1))
    return points.gather(0, best)[0].exp().float()


def _draft_len(batches: Iterable[DraftLogits]) -> int:
    """Check all batches and return their D."""
    draft_len: int | str = "D"
    for batch in batches:
        tensor("logits", batch.logits, "float", ("N", draft_len, "V"))
        rows, draft_len = batch.logits.shape[:2]
        tensor("draft_ids", batch.draft_ids, "int", (rows, draft_len))
        tensor("accepted", batch.accepted, "bool", (rows, draft_len))
        tensor("mask", batch.mask, "bool", (rows, draft_len))
        _check_logits(batch)
    if isinstance(draft_len, str):
        raise ValueError("recorded: expected one batch at least, got none")
    return draft_len


def _check_logits(batch: DraftLogits) -> None:
    """Refuse logits whose confidence would be NaN: the largest of a draft shows NaN, +inf, and -inf everywhere."""
    top = batch.logits.amax(-1).double()
    wrong = (batch.mask & ~(top.abs() <= LARGEST_LOGIT)).nonzero()
    if len(wrong):
        n, k = wrong[0].tolist()
        expected = f"no NaN and a largest logit within {LARGEST_LOGIT:g} of 0 where mask is True"
        raise ValueError(f"logits: expected {expected}, got {top[n, k].item():g} at [{n}, {k}]")


def _nll(batch: DraftLogits, temperature: Tensor) -> Tensor:
    """Negative log-likelihood of acceptance at temperatures [D]: float64 [D]."""
    scaled = batch.logits.float() / temperature.to(batch.logits.device, torch.float32)[:, None]
    draft_ids = batch.draft_ids.long().where(batch.mask, 0)
    log = (scaled.gather(-1, draft_ids[..., None])[..., 0] - scaled.logsumexp(-1)).double()
    log = log.clamp(-LARGEST, -SMALLEST)
    loss = -torch.where(batch.accepted, log, torch.log(-torch.expm1(log)))
    return loss.where(batch.mask, 0).sum(0)
