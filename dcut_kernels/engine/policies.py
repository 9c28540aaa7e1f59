"""How much of the drafts a step verifies, by name."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from .._schema import MAX_DRAFT_LEN
from ..integration import Drafts

Plan = Literal["argmax", "early_stop", "history"]
AUTO = "-auto"
FORMS = (
    "ar, full, uniform-K with K drafts, ratio-R with 0 < R < 1, dcut, dcut-early_stop, dcut-history, "
    "or one of these three with -auto behind it to decode plainly where that is faster"
)
PLANS: dict[str, Plan] = {"dcut": "argmax", "dcut-early_stop": "early_stop", "dcut-history": "history"}


class Policy(NamedTuple):
    """One way to choose; at most one of `depth`, `ratio` and `plan` is set."""

    name: str
    depth: int | None = None
    ratio: float | None = None
    plan: Plan | None = None  # policy of ``select_and_pack``
    auto: bool = False  # whether the drafter may rest

    @property
    def drafts(self) -> bool:
        """Whether the drafter runs at all."""
        return self.name != "ar"

    def options(self, drafts: Drafts) -> dict[str, Any]:
        """Options of ``select_and_pack`` that express the policy for one step."""
        base, rows = int(drafts.base_lens.sum()), int((drafts.draft_lens > 0).sum())
        depth = drafts.confidence.shape[1]
        if self.ratio is not None:  # the paper's K, for the rows that have drafts
            return {"budget": base - rows + max(rows, math.ceil(self.ratio * rows * (depth + 1)))}
        everything = {"budget": base + rows * depth}
        if self.depth is None:
            return everything
        return everything | {"max_keep": torch.full_like(drafts.draft_lens, self.depth)}


def parse(name: str, draft_len: int = MAX_DRAFT_LEN) -> Policy:
    """Policy of a name.

    Parameters
    ----------
    name : str
        One of `FORMS`.
    draft_len : int
        ``D``, the most that "uniform-K" may ask for.

    Raises
    ------
    ValueError
        If there is none of this name, or it asks for more drafts than there are.
    """
    kind, _, value = name.partition("-")
    if name in ("ar", "full"):
        return Policy(name)
    if (plan := PLANS.get(name.removesuffix(AUTO))) is not None:
        return Policy(name, plan=plan, auto=name.endswith(AUTO))
    if kind == "uniform" and value.isdecimal():
        if int(value) > draft_len:  # it would be full verification under another name
            raise ValueError(f"policy: expected uniform-K with K up to {draft_len}, the drafts of a row, got {name!r}")
        return Policy(name, depth=int(value))
    try:
        ratio = float(value)
    except ValueError:
        ratio = math.nan
    if kind == "ratio" and 0 < ratio < 1:
        return Policy(name, ratio=ratio)
    raise ValueError(f"policy: expected {FORMS}, got {name!r}")
