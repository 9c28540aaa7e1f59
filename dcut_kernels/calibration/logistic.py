"""Logistic calibration, fitted online from what verification accepts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .._schema import MAX_DRAFT_LEN
from ._values import draft_length, positive, tensor
from .feedback import feedback, read, weights
from .table import grid, table_of

# Logits are clipped to [-4, 4].  Above, at 0.982, confidences differ by less than 2 %, but their logits without limit:
# one rejection at full confidence would outweigh all else.  The table has one line from 0.917 to 1 anyway.
CLIP = 4.0
NODES = 17  # of the histogram over logits
SLOPES = (1 / 16, 16.0)
LENGTHS = 8  # step lengths tried: 1, 1/2, 1/4, ...
# A request whose rate differs by r > 0.2 from what is calibrated, over some 64 observations, counts (0.2 / r)^2.
TOLERANCE, REQUEST_MEMORY, REQUEST_PRIOR = 0.2, 64.0, 8.0
REQUESTS = 4096  # remembered, by number modulo this


class OnlineLogistic(nn.Module):
    r"""Calibrated confidence :math:`\sigma(a \cdot \mathrm{logit}(c) + b_k)`, slope ``a`` shared by all positions.

    Feedback goes into a histogram over logits for each position, whose observations fade, and each update takes one
    Newton step on its log-likelihood.  So the fit depends on the counts and hardly on their sequence.  Without
    feedback it is the identity.  Logits are clipped to [-4, 4]: the calibrated confidence is proportional to the
    confidence below 0.018, and above 0.982 constant, once confidences of that size were observed.  State
    (``state_dict``), device (``to``) and copies are those of a module.

    Parameters
    ----------
    draft_len : int
        Draft positions, ``D``.
    strength : float
        Pseudo-observations per position that are calibrated already, spread evenly over the logits: the prior.
    memory : float
        Observations of a position after which old ones have faded to 1/e.  A position that is not verified forgets
        nothing.
    """

    slope: Tensor  # float64 []
    intercept: Tensor  # float64 [D]
    seen: Tensor  # float64 [D, 17]
    accepted: Tensor  # float64 [D, 17]
    requests: Tensor  # float64 [4096, 2]: sum of outcome minus calibrated confidence, observations
    nodes: Tensor  # float64 [17], logits

    def __init__(self, draft_len: int, *, strength: float = 16.0, memory: float = 4096.0) -> None:
        super().__init__()
        self.draft_len = draft_length(draft_len, MAX_DRAFT_LEN)
        self.strength, self.memory = positive("strength", strength), positive("memory", memory)
        self.register_buffer("slope", torch.ones((), dtype=torch.float64))
        self.register_buffer("intercept", torch.zeros(draft_len, dtype=torch.float64))
        for name in ("seen", "accepted"):
            self.register_buffer(name, torch.zeros(draft_len, NODES, dtype=torch.float64))
        self.register_buffer("requests", torch.zeros(REQUESTS, 2, dtype=torch.float64))
        self.register_buffer("nodes", torch.linspace(-CLIP, CLIP, NODES, dtype=torch.float64), persistent=False)
        self._low, self._high = torch.tensor([-CLIP, CLIP], dtype=torch.float64).sigmoid().tolist()

    def forward(self, confidence: Tensor) -> Tensor:
        """Calibrated confidences.

        Parameters
        ----------
        confidence : Tensor, float [N, D]
            Drafter confidence, read as in `feedback`.

        Returns
        -------
        Tensor, float64 [N, D]
            The curve itself; the operator's table is linear between 65 of its points.
        """
        tensor("confidence", confidence, "float", ("N", self.draft_len))
        values = read(confidence.double())
        prior = self.strength / NODES
        unseen = prior / (prior + self.seen[:, -1])  # 1 before any confidence beyond the clip was observed
        beyond = values.clamp(max=self._low) / self._low * (values.clamp(min=self._high) / self._high) ** unseen
        return ((self.slope * self._logit(values) + self.intercept).sigmoid() * beyond).clamp(max=1)

    def _logit(self, values: Tensor) -> Tensor:
        return values.clamp(self._low, self._high).logit()

    @torch.no_grad()
    def table(self) -> Tensor:
        """Argument ``calibration`` of ``select_and_pack``, int32 [D, 65]."""
        return table_of(self(grid(self.slope.device)[:, None].expand(-1, self.draft_len)).T)

    @torch.no_grad()
    def update(
        self,
        confidence: Tensor,
        keep_lens: Tensor,
        accepted: Tensor,
        *,
        weight: Tensor | None = None,
        requests: Tensor | None = None,
    ) -> None:
        """Learn from a verified step.

        Parameters
        ----------
        confidence : Tensor, float [B, D]
            Confidences of the step, before calibration.
        keep_lens, accepted : Tensor, int32 or int64 [B]
            Drafts that were verified, and of these accepted.
        weight : Tensor, float [B], optional
            How much each request counts, clamped to [0, 1]: 0 for one that is known to be unlike the others.
        requests : Tensor, int32 or int64 [B], optional
            Number of each request, the same from step to step and each once.  With it a request that is accepted far
            less or more often than is calibrated counts less: penalties or a grammar may reject whatever is drafted.

        Raises
        ------
        ValueError
            If shapes or dtypes differ from these.
        """
        tensor("confidence", confidence, "float", ("B", self.draft_len))
        values, outcome, mask = feedback(confidence, keep_lens, accepted)
        counted = weights(mask, weight)
        if requests is not None:
            tensor("requests", requests, "int", keep_lens.shape)
            error = mask * (outcome.double() - self(values))
            counted = counted * self._trust(requests.long() % REQUESTS, error.sum(1), mask.sum(1))[:, None]
        counted = counted[..., None]
        logits = self._logit(values.double())[..., None]
        near = (1 - (logits - self.nodes).abs() / (self.nodes[1] - self.nodes[0])).clamp(min=0)  # shares of two nodes
        seen = (counted * near).sum(0)
        fading = (-seen.sum(1, keepdim=True) / self.memory).exp()
        self.seen.mul_(fading).add_(seen)
        self.accepted.mul_(fading).add_((counted * near * outcome[..., None]).sum(0))
        self.refine()

    def _trust(self, places: Tensor, error: Tensor, count: Tensor) -> Tensor:
        """Weight of each request, float64 [B], by its record, which takes in the errors of a step [B]."""
        record = torch.stack([error, count.double()], 1)
        record += self.requests[places] * (-count / REQUEST_MEMORY).exp()[:, None]
        self.requests[places] = record
        rate = record[:, 0].abs() / (record[:, 1] + REQUEST_PRIOR)
        return (TOLERANCE / rate.clamp(min=TOLERANCE)).square()

    @torch.no_grad()
    def refine(self, steps: int = 1) -> None:
        """Take Newton steps towards the best fit of what has been counted; `update` takes one."""
        prior = self.strength / NODES
        n, hits = self.seen + prior, self.accepted + prior * self.nodes.sigmoid()  # [D, 17]
        lengths = torch.cat([0.5 ** torch.arange(LENGTHS, device=n.device), torch.zeros(1, device=n.device)]).double()
        for _ in range(steps):
            p = (self.slope * self.nodes + self.intercept[:, None]).sigmoid()
            miss, w = hits - n * p, n * p * (1 - p)
            # The Hessian is an arrow: its corner h_aa, its edge h_ab and its diagonal h_bb.
            g_a, g_b = (miss * self.nodes).sum(), miss.sum(1)
            h_aa, h_ab, h_bb = (w * self.nodes.square()).sum(), (w * self.nodes).sum(1), w.sum(1).clamp(min=1e-12)
            step = (g_a - (h_ab * g_b / h_bb).sum()) / (h_aa - (h_ab.square() / h_bb).sum()).clamp(min=1e-12)
            step = (self.slope + step).clamp(*SLOPES) - self.slope
            slopes = self.slope + lengths * step
            intercepts = self.intercept + lengths[:, None] * ((g_b - h_ab * step) / h_bb)
            eta = slopes[:, None, None] * self.nodes + intercepts[..., None]  # [9, D, 17]
            best = (n * softplus(eta) - hits * eta).sum((1, 2)).argmin()
            self.slope.copy_(slopes[best])
            self.intercept.copy_(intercepts[best])
