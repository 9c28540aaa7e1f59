"""Isotonic regression: the calibration that assumes nothing but order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._values import positive, tensor
from .feedback import read
from .table import grid


@dataclass(frozen=True)
class PiecewiseLinear:
    """A curve of lines between knots, constant beyond the first and last.

    Attributes
    ----------
    x, y : Tensor, float64 [n]
        Confidences, ascending, and what they are calibrated to, never falling.
    """

    x: Tensor
    y: Tensor

    def __call__(self, confidence: Tensor) -> Tensor:
        if len(self.x) == 1:
            return self.y.expand(confidence.shape)
        right = torch.searchsorted(self.x, confidence).clamp(1, len(self.x) - 1)
        left = right - 1
        part = ((confidence - self.x[left]) / (self.x[right] - self.x[left])).clamp(0, 1)
        return self.y[left].lerp(self.y[right], part)


def isotonic_regression(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never-falling sequence closest to `values` in weighted squares, by pooling adjacent violators.

    Parameters
    ----------
    values, weights : sequence of float
        Of one length, finite; weights above 0.

    Raises
    ------
    ValueError
        If they are not.
    """
    blocks: list[tuple[float, float, int]] = []  # weighted mean, weight, length; means ascend
    for value, weight in zip(values, weights, strict=True):
        positive("weights", weight)
        if not math.isfinite(value):
            raise ValueError(f"values: expected finite numbers, got {value}")
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, mass, size = blocks.pop()
            mean = (before * mass + mean * total) / (mass + total)
            total, length = mass + total, size + length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def fit_isotonic(
    confidence: Tensor,
    accepted: Tensor,
    mask: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    pooled: bool = False,
    strength: float = 1.0,
) -> list[PiecewiseLinear]:
    """Fit a never-falling curve to each draft position, for `compile_table`.

    Observations are pooled by the entry of the table that is nearest to them.

    Parameters
    ----------
    confidence : Tensor, float [N, D]
        Drafter confidence, read as in `feedback`; drafts with a confidence of NaN are left out.
    accepted : Tensor, bool [N, D]
        Whether the draft was accepted.
    mask : Tensor, bool [N, D], optional
        Where that is known.
    weight : Tensor, float [N, D], optional
        Weight of each observation, 0 and above.
    pooled : bool
        Fit one curve to all positions.
    strength : float
        Pseudo-observations per curve that are calibrated already, spread evenly over confidences ``2^(-j / 8)``.  They
        keep rates above 0, and the curve at the identity where there are no data.

    Returns
    -------
    list of PiecewiseLinear
        ``D`` curves.

    Raises
    ------
    ValueError
        If shapes or dtypes differ from these, or a weight or `strength` is not a finite number from 0 on.
    """
    tensor("confidence", confidence, "float", ("N", "D"))
    tensor("accepted", accepted, "bool", confidence.shape)
    if mask is None:
        mask = torch.ones_like(accepted)
    if weight is None:
        weight = torch.ones_like(accepted, dtype=torch.float64)
    tensor("mask", mask, "bool", confidence.shape)
    tensor("weight", weight, "float", confidence.shape)
    if not ((weight >= 0) & (weight < math.inf)).all() or not 0 <= strength < math.inf:
        raise ValueError("weight, strength: expected finite numbers from 0 on, got a negative one, inf or NaN")
    columns = [
        (read(confidence[seen, k].double()), accepted[seen, k].double(), weight[seen, k].double())
        for k, seen in enumerate((mask & ~confidence.isnan()).T)
    ]
    if pooled and columns:
        values, outcomes, counts = (torch.cat(parts) for parts in zip(*columns, strict=True))
        return [_fit(values, outcomes, counts, strength)] * len(columns)
    return [_fit(*column, strength) for column in columns]


def _fit(confidence: Tensor, outcome: Tensor, weight: Tensor, strength: float) -> PiecewiseLinear:
    """Curve of observations [n] and pseudo-observations, pooled by the nearest entry of a table.

    A table keeps no more than one value around each entry, and a fit to single observations ends in steps of 0 and 1.
    """
    prior = grid().flip(0)  # ascending
    values = torch.cat([confidence.cpu(), prior])
    weights = torch.cat([weight.cpu(), torch.full_like(prior, strength / len(prior))])
    cells = len(prior) - 1 - (-8 * values.log2()).round().clamp(0, len(prior) - 1).long()
    total, places, sums = (
        torch.zeros_like(prior).index_add(0, cells, weights * each)
        for each in (torch.ones_like(values), values, torch.cat([outcome.cpu(), prior]))
    )
    known = total > 0
    if not known.any():
        return PiecewiseLinear(torch.tensor([0.0, 1.0]).double(), torch.tensor([0.0, 1.0]).double())
    places, sums, total = (places / total)[known], sums[known], total[known]
    fitted = torch.tensor(isotonic_regression((sums / total).tolist(), total.tolist()), dtype=torch.float64)
    steps = fitted.diff() != 0
    ends = torch.ones(1, dtype=torch.bool)
    corners = torch.cat([ends, steps]) | torch.cat([steps, ends])
    return PiecewiseLinear(places[corners], fitted[corners])
