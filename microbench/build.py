"""How a case is put together: the inputs of one call, completed deterministically from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
RATIOS = (0.25, 0.5, 0.75, 1.0)
_INT32_OPTIONS = (
    "draft_lens", "min_keep", "max_keep", "row_index", "base_lens", "num_reqs", "block_table", "calibration",
    "envelope", "next_budget",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of `select_and_pack`.

    Attributes
    ----------
    name : str
        What the case is about.
    inputs : dict
        Keyword arguments; options at their default are left out.
    """

    name: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return self.inputs["bonus_ids"].shape[0]

    @property
    def draft_len(self) -> int:
        return self.inputs["draft_ids"].shape[1]

    @property
    def buckets(self) -> int:
        return self.inputs["budgets"].shape[-1]

    @property
    def capacity(self) -> int:
        return self.inputs.get("capacity", self.batch * (self.draft_len + 1))


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def float32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)


def ratio_budgets(batch: int, draft_len: int, ratios: Sequence[float] = RATIOS) -> list[int]:
    """Budgets of the paper: ``max(B, ceil(ratio * B * (D + 1)))``."""
    return [max(batch, math.ceil(ratio * batch * (draft_len + 1))) for ratio in ratios]


def h20_costs(batch: int, budgets: Tensor) -> Tensor:
    """Milliseconds of a step: a fit of the table published for Qwen3-8B on an H20."""
    return (4.5 + 0.38 * batch + 0.103 * budgets.float()).clamp(min=7.2)


def beta(rng: np.random.Generator, rows: int, draft_len: int) -> Tensor:
    """Confidences with the mean and the variance of a recorded block-parallel drafter."""
    return torch.from_numpy(rng.beta(0.7, 0.7, (rows, draft_len)).astype(np.float32))


def make(
    name: str,
    confidence: Any,
    budgets: Any = None,
    costs: Any = None,
    *,
    ids: torch.dtype = torch.int32,
    seq_lens: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Build a case: token ids are random, budgets and costs those of the paper unless given.

    Parameters
    ----------
    name : str
    confidence : Tensor or nested list [slots, D]
    budgets, costs : Tensor or nested list [R] or [M, R], optional
    ids : torch.dtype
        Of the token ids.
    seq_lens : Tensor [B], optional
    seed : int
    **options
        Further arguments of `select_and_pack`; nested lists become tensors of the right type.
    """
    rng = np.random.default_rng(seed)
    confidence = confidence if isinstance(confidence, Tensor) else float32(confidence)
    slots, draft_len = confidence.shape
    options |= {option: int32(options[option]) for option in _INT32_OPTIONS if option in options}
    if "weight" in options:
        options["weight"] = float32(options["weight"])
    batch = options["row_index"].shape[0] if "row_index" in options else slots
    budgets = int32(ratio_budgets(batch, draft_len) if budgets is None else budgets)
    inputs = {
        "confidence": confidence,
        "draft_ids": torch.from_numpy(rng.integers(0, 150_000, (slots, draft_len))).to(ids),
        "bonus_ids": torch.from_numpy(rng.integers(0, 150_000, batch)).to(ids),
        "seq_lens": int32(rng.integers(0, 5000, batch)) if seq_lens is None else seq_lens,
        "budgets": budgets,
        "costs": h20_costs(batch, budgets) if costs is None else float32(costs),
    }
    return Case(name, inputs | options)
