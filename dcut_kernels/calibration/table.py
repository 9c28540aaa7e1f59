"""The table that ``select_and_pack`` looks confidences up in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import log_prefix_sum
from ..reference import CALIBRATION_CELLS, Q_MAX, UNIT
from ._values import tensor

Curve = Callable[[Tensor], Tensor]  # confidences, float64 [n], to calibrated confidences [n]
_LAUNCH = 4096  # rows that one launch serves on every device


class Calibration(Protocol):
    """Whatever compiles into a table."""

    def table(self) -> Tensor:
        """Argument ``calibration`` of ``select_and_pack``, int32 [D, 65]."""
        ...


def fit_of(calibration: Calibration | None) -> dict[str, Any]:
    """What a calibration that is a ``torch.nn.Module`` has learned, as plain Python values; of others nothing."""
    fit: dict[str, Tensor] = calibration.state_dict() if isinstance(calibration, nn.Module) else {}
    return {name: values.tolist() for name, values in fit.items()}


def restore_fit(calibration: Calibration | None, fit: dict[str, Any]) -> bool:
    """Restore what `fit_of` returned; whether there was anything to restore."""
    if not fit or not isinstance(calibration, nn.Module):
        return False
    known = calibration.state_dict()
    calibration.load_state_dict({name: torch.tensor(v, dtype=known[name].dtype) for name, v in fit.items()})
    return True


def grid(device: torch.device | None = None) -> Tensor:
    """Confidences that a table has entries for, ``2^(-j / 8)``: float64 [65]."""
    return torch.exp2(-torch.arange(CALIBRATION_CELLS + 1, dtype=torch.float64, device=device) / 8)


def table_of(calibrated: Tensor) -> Tensor:
    """Table of calibrated confidences at `grid`, [D, 65]: never falling in ``j``, so that it keeps the order."""
    q = (-torch.log2(calibrated.double()) * UNIT).round().clamp(0, Q_MAX)
    return q.cummax(1).values.to(torch.int32)


def compile_table(curves: Sequence[Curve]) -> Tensor:
    """Sample one curve per draft position into a table.

    Entry ``j`` of a position is ``-log2(curve(2^(-j / 8)))`` in units of 2^-20, rounded, then the running maximum over
    ``j``: where a curve rises as confidence falls, it is made flat.  Between two entries the operator is linear in
    ``-log2``, and below a confidence of 2^-8 it divides by a constant.

    Parameters
    ----------
    curves : sequence of callable
        ``D`` functions from confidences, float64 [n], to calibrated ones [n]; results below 0 and above 1 are clamped.

    Returns
    -------
    Tensor, int32 [D, 65]
        Argument ``calibration`` of ``select_and_pack``.

    Raises
    ------
    ValueError
        If a curve returns another shape, or NaN.
    """
    points = grid()
    sampled = torch.empty(len(curves), len(points), dtype=torch.float64)
    for k, curve in enumerate(curves):
        values = curve(points)
        tensor(f"curves[{k}]", values, "float", points.shape)
        if values.isnan().any():
            raise ValueError(f"curves[{k}]: expected numbers, got NaN at {points[values.isnan()][0].item():.4g}")
        sampled[k] = values.clamp(0, 1)
    return table_of(sampled)


def calibrated_q(table: Tensor, confidence: Tensor) -> Tensor:
    """Look confidences up as the operator does: by the operator, one position at a time.

    Parameters
    ----------
    table : Tensor, int32 [D, 65]
        Compiled calibration.
    confidence : Tensor, float32, float16 or bfloat16 [N, D]
        Drafter confidence.

    Returns
    -------
    Tensor, int32 [N, D]
        ``-log2`` of the calibrated confidence in units of 2^-20.
    """
    tensor("confidence", confidence, "float", ("N", "D"))
    tensor("table", table, "int32", (confidence.shape[1], CALIBRATION_CELLS + 1))
    q = torch.empty(confidence.shape, dtype=torch.int32, device=confidence.device)
    for k, row in enumerate(table.split(1)):
        for part, result in zip(confidence[:, k : k + 1].split(_LAUNCH), q.split(_LAUNCH), strict=True):
            result[:, k : k + 1] = log_prefix_sum(part.contiguous(), calibration=row)
    return q


def apply(table: Tensor, confidence: Tensor) -> Tensor:
    """Calibrated confidences, float64 [N, D]: ``2^-q`` of the integers of `calibrated_q`, of the same arguments."""
    return torch.exp2(-calibrated_q(table, confidence).double() / UNIT)
