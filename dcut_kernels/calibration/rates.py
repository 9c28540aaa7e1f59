"""Acceptance by position, for drafters that have no probabilities."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._schema import MAX_DRAFT_LEN
from ..reference import CALIBRATION_CELLS
from ._values import draft_length, positive
from .feedback import observed, weights
from .table import table_of


class PositionRates(nn.Module):
    """Measured acceptance of each draft position, given that those before it were accepted.

    Its table is constant: give the operator a confidence of 1 for every draft, and position ``k`` scores the product
    of the first ``k`` rates.

    Parameters
    ----------
    draft_len : int
        Draft positions, ``D``.
    prior_rate : float
        Rate of a position that was never verified; mean of the beta prior.
    strength : float
        Observations that the prior counts as.
    memory : float
        Observations of a position after which old ones have faded to 1/e.
    """

    seen: Tensor  # float64 [D]
    accepted: Tensor  # float64 [D]

    def __init__(
        self, draft_len: int, *, prior_rate: float = 0.5, strength: float = 4.0, memory: float = 4096.0
    ) -> None:
        super().__init__()
        self.draft_len = draft_length(draft_len, MAX_DRAFT_LEN)
        self.prior_rate = positive("prior_rate", prior_rate, most=1)
        self.strength, self.memory = positive("strength", strength), positive("memory", memory)
        for name in ("seen", "accepted"):
            self.register_buffer(name, torch.zeros(draft_len, dtype=torch.float64))

    @torch.no_grad()
    def update(self, keep_lens: Tensor, accepted: Tensor, weight: Tensor | None = None) -> None:
        """Count a verified step; arguments as in `OnlineLogistic.update`."""
        outcome, mask = observed(keep_lens, accepted, self.draft_len)
        counted = weights(mask, weight)
        fading = (-counted.sum(0) / self.memory).exp()
        self.seen.mul_(fading).add_(counted.sum(0))
        self.accepted.mul_(fading).add_((counted * outcome).sum(0))

    def rates(self) -> Tensor:
        """Acceptance of each position, between 0 and 1: float64 [D]."""
        return (self.accepted + self.prior_rate * self.strength) / (self.seen + self.strength)

    def table(self) -> Tensor:
        """Argument ``calibration`` of ``select_and_pack``, int32 [D, 65]: one value per position."""
        return table_of(self.rates()[:, None].expand(-1, CALIBRATION_CELLS + 1))
