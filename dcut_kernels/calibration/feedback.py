"""What a verified step says about confidences, and how good they were."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._values import tensor

BINS = 15


class Feedback(NamedTuple):
    """Observations of one step.

    Attributes
    ----------
    values : Tensor, float32 [B, D]
        Confidences as the operator reads them: NaN and negative values are 0, values above 1 are 1.
    outcome : Tensor, bool [B, D]
        Whether the draft was accepted; False where nothing was observed.
    mask : Tensor, bool [B, D]
        Where there is an observation.
    """

    values: Tensor
    outcome: Tensor
    mask: Tensor


class Report(NamedTuple):
    """Quality of confidences; what cannot be computed is NaN.

    Attributes
    ----------
    n : int
        Observations.
    ece : float
        Expected calibration error over 15 bins of equal width; a bin holds its lower edge, the last one both.
    brier : float
        Mean squared difference of confidence and outcome.
    auroc : float
        Probability that an accepted draft has the higher confidence of a pair, ties counting half; calibration that
        keeps the order of all observations does not change it.
    """

    n: int
    ece: float
    brier: float
    auroc: float


def read(confidence: Tensor) -> Tensor:
    """Confidences as the operator reads them, of the same dtype."""
    return confidence.nan_to_num(0.0).clamp(0, 1)


def observed(keep_lens: Tensor, accepted: Tensor, draft_len: int) -> tuple[Tensor, Tensor]:
    """Outcome and mask of `feedback`, bool [B, D] each."""
    tensor("keep_lens", keep_lens, "int", ("B",))
    tensor("accepted", accepted, "int", keep_lens.shape)
    k = torch.arange(1, draft_len + 1, device=keep_lens.device)
    mask = k <= torch.minimum(accepted + 1, keep_lens)[:, None]
    return mask & (k <= accepted[:, None]), mask


def weights(mask: Tensor, weight: Tensor | None) -> Tensor:
    """Weight of each observation, float64 [B, D]: at most 1, so that no request counts more than once a step."""
    if weight is None:
        return mask.double()
    tensor("weight", weight, "float", mask.shape[:1])
    return mask * read(weight.double())[:, None]


def feedback(confidence: Tensor, keep_lens: Tensor, accepted: Tensor) -> Feedback:
    """Observations of a verified step.

    Of ``n`` verified drafts ``a`` were accepted: drafts 1 to ``a`` are positive observations, draft ``a + 1`` is a
    negative one if it was verified, later ones are unknown, since what came before them was wrong.  Drafts with a
    confidence of NaN are left out.

    Parameters
    ----------
    confidence : Tensor, float [B, D]
        Confidences of the step, before calibration.
    keep_lens : Tensor, int32 or int64 [B]
        Drafts that were verified, ``n``.
    accepted : Tensor, int32 or int64 [B]
        Drafts that were accepted, ``a <= n``.

    Returns
    -------
    Feedback

    Raises
    ------
    ValueError
        If shapes or dtypes differ from these.
    """
    tensor("confidence", confidence, "float", ("B", "D"))
    tensor("keep_lens", keep_lens, "int", confidence.shape[:1])
    outcome, mask = observed(keep_lens, accepted, confidence.shape[1])
    known = ~confidence.isnan()
    return Feedback(read(confidence).float(), outcome & known, mask & known)


def report(confidence: Tensor, accepted: Tensor, mask: Tensor | None = None) -> Report:
    """Measure how good confidences were.

    Parameters
    ----------
    confidence : Tensor, float, any shape
        Estimates that a draft is accepted, given that those before it were; read as in `feedback`.
    accepted : Tensor, bool, same shape
        Whether it was.
    mask : Tensor, bool, same shape, optional
        Observations that count.

    Returns
    -------
    Report

    Raises
    ------
    ValueError
        If shapes or dtypes differ from these.
    """
    tensor("accepted", accepted, "bool", confidence.shape)
    if mask is None:
        mask = torch.ones_like(accepted)
    tensor("mask", mask, "bool", confidence.shape)
    values, outcome = read(confidence[mask].double()), accepted[mask]
    n = len(values)
    if n == 0:
        return Report(0, math.nan, math.nan, math.nan)
    error = values - outcome.double()
    bins = (values * BINS).long().clamp(max=BINS - 1)
    gaps = error.new_zeros(BINS).index_add(0, bins, error)  # of sums: size times the difference of the means
    return Report(n, (gaps.abs().sum() / n).item(), error.square().mean().item(), _auroc(values, outcome))


def _auroc(values: Tensor, outcome: Tensor) -> float:
    """The rank statistic of Mann and Whitney, from twice the middle ranks, which are integers."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    twice_ranks = (2 * counts.cumsum(0) - counts + 1)[inverse]
    positive = int(outcome.sum())
    negative = len(values) - positive
    if not positive or not negative:
        return math.nan
    return (int(twice_ranks[outcome].sum()) - positive * (positive + 1)) / (2 * positive * negative)
