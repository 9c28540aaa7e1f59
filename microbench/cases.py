"""The registry that tests and benchmarks share.

``LISTED`` names every promise, ``BENCH`` is the grid as it is timed, `random_case` draws everything from a seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .build import INT32_MAX, Case, beta, make, ratio_budgets
from .listed import LISTED

__all__ = ["BENCH", "BENCH_BATCHES", "BENCH_DRAFT_LENS", "LISTED", "Case", "bench_case", "make", "random_case"]

BENCH_BATCHES = (1, 8, 32, 64, 256, 1024)
BENCH_DRAFT_LENS = (7, 15, 31)
BUCKETS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 6, 7, 8, 9, 12, 17)
INT32_LIMITS = (-INT32_MAX - 1, -1, 0, 1, INT32_MAX)
INT64_LIMITS = (-(2**63), 2**63 - 1, -1, 2**31 - 1, 2**31, 2**32 + 5)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)
NAN, INF = np.nan, np.inf
SPECIAL = np.array([0, -0.0, 1, 0.5, 0.25, NAN, INF, -INF, -1, 2, 1e-30, 1e-45, 2**-126, 1 - 2**-24, 0.9], np.float32)
SPECIAL_LOGS = np.array([0, -0.0, -INF, INF, NAN, 1, -1e-9, -0.5, -0.693, -38.8, -38.9, -44.3, -44.4, -64], np.float32)
SPECIAL_WEIGHTS = np.array([1, 1, 2, 0.5, 256, 2**-8, NAN, 0, -1, INF, 1e9, 1e-9, 0.3, 1.7], np.float32)
SPECIAL_COSTS = np.array([0, -1, NAN, INF, -INF, 1e-45, 3e38, 1, 1, 1], np.float32)


def bench_case(batch: int, draft_len: int) -> Case:
    """One step of a decoding engine: recorded-like confidences, the paper's four budgets, an H20's costs."""
    confidence = beta(np.random.default_rng(batch * 64 + draft_len), batch, draft_len)
    return make(f"{batch}x{draft_len}", confidence, seed=draft_len)


BENCH = [bench_case(batch, draft_len) for batch in BENCH_BATCHES for draft_len in BENCH_DRAFT_LENS]


def _scores(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Confidences of one of nine kinds, as float32."""
    kind = rng.integers(9)
    if kind == 0:
        return rng.beta(0.7, 0.7, shape)
    if kind == 1:
        return rng.choice(rng.uniform(0, 1, 3), shape)
    if kind == 2:
        return 2.0 ** -rng.integers(0, 70 if rng.random() < 0.2 else 4, shape)
    if kind == 3:
        return 1 - rng.uniform(0, 10.0 ** -rng.integers(2, 8), shape)
    if kind == 4:
        return 10 ** -rng.uniform(0, 45 if rng.random() < 0.5 else 10, shape)
    if kind == 5:
        return rng.choice(SPECIAL, shape)
    if kind == 6:
        return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    if kind == 7:
        return np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), rng.beta(2, 0.5, shape))
    return np.full(shape, rng.choice([0.0, 1.0, 0.5, 0.7, 0.999]))


def _confidence(rng: np.random.Generator, shape: tuple[int, int], log: bool) -> Tensor:
    with np.errstate(all="ignore"):
        values = _scores(rng, shape)
        if log:
            values = np.log(np.abs(values)) if rng.random() < 0.7 else rng.choice(SPECIAL_LOGS, shape)
        return torch.from_numpy(values.astype(np.float32)).to(DTYPES[rng.integers(len(DTYPES))])


def _lengths(rng: np.random.Generator, rows: int, top: int) -> np.ndarray:
    """Integers around ``[0, top]``, sometimes the limits of int32."""
    values = rng.integers(-1, top + 3, rows)
    return values if rng.random() < 0.9 else np.where(rng.random(rows) < 0.5, rng.choice(INT32_LIMITS, rows), values)


def _tables(rng: np.random.Generator, batch: int, draft_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Budgets and costs, each [R] or [M, R]."""
    top = batch * (draft_len + 1)
    buckets = BUCKETS[rng.integers(len(BUCKETS))] if rng.random() < 0.997 else 256
    rows = int(rng.integers(1, batch + 3))
    budgets_shape, costs_shape = [((rows, buckets) if rng.random() < 0.25 else (buckets,)) for _ in range(2)]
    kind = rng.integers(4)
    if kind == 0 and budgets_shape == (4,):
        budgets = np.array(ratio_budgets(batch, draft_len))
    elif kind == 1:
        budgets = rng.integers(max(top // 2, 0), top + 1, budgets_shape)
    else:
        budgets = rng.integers(-1, top + 3, budgets_shape)
        if kind == 2 and rng.random() < 0.3:
            budgets = np.where(rng.random(budgets_shape) < 0.3, rng.choice(INT32_LIMITS, budgets_shape), budgets)
    kind = rng.integers(4)
    if kind == 0:
        costs = np.ones(costs_shape)
    elif kind == 1:
        costs = rng.choice(SPECIAL_COSTS, costs_shape)
    elif kind == 2 and budgets_shape == costs_shape:
        costs = np.maximum(4, budgets) ** rng.uniform(0.3, 1.2)
    else:
        costs = rng.uniform(0.5, 2, costs_shape)
    return budgets, costs


def _paging(rng: np.random.Generator, batch: int) -> tuple[dict[str, Any], Tensor]:
    """Block table, block size and sequence lengths that fall inside it, at its end, and outside."""
    seq_dtype = np.int64 if rng.random() < 0.3 else np.int32
    if rng.random() < 0.5:
        seq_lens = rng.integers(0, 5000, batch)
        if rng.random() < 0.1:
            seq_lens = rng.choice(INT64_LIMITS if seq_dtype is np.int64 else INT32_LIMITS, batch)
        return {}, torch.from_numpy(seq_lens.astype(seq_dtype))
    blocks, size = int(rng.integers(0, 5)), int(rng.choice([1, 2, 16, 17, 2**31 - 1]))
    ids = rng.integers(-1, 1000, (batch, blocks))
    if rng.random() < 0.1:
        ids = rng.choice(INT32_LIMITS, (batch, blocks))
    top = min(blocks * min(size, 64) + 3, 5000)
    seq_lens = rng.integers(-2, top, batch).astype(seq_dtype)
    return {"block_table": ids, "block_size": size}, torch.from_numpy(seq_lens)


def convex(rng: np.random.Generator, budgets: np.ndarray) -> np.ndarray:
    """Height and slope at each budget of a convex function that rises, int64 [..., 2]."""
    at = np.clip(budgets, 0, 2**24).astype(np.int64)
    base, slope, bend = rng.integers(1, 2**20), rng.integers(0, 2**10), rng.integers(0, 4)
    return np.stack([base + slope * at + bend * at * (at - 1) // 2, slope + bend * at], -1)


def _policy(rng: np.random.Generator, budgets: np.ndarray, draft_len: int, given: bool) -> dict[str, Any]:
    """Calibration, how the budget is chosen, and where the next one goes; `given`: there is a budget."""
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        shape = (draft_len, 65)
        steps = rng.integers(0, 2**18, shape).cumsum(1) + rng.integers(0, 2**18, (draft_len, 1))
        garbage = rng.choice(INT32_LIMITS, shape) if rng.random() < 0.3 else rng.integers(-(2**20), 2**27, shape)
        options["calibration"] = steps if rng.random() < 0.6 else garbage
    if rng.random() < 0.25:
        rows = budgets.shape[:-1] or ((int(rng.integers(1, 4)),) if rng.random() < 0.3 else ())
        envelope = convex(rng, np.broadcast_to(budgets, (*rows, budgets.shape[-1])))
        if rng.random() < 0.3:
            envelope = rng.choice(INT32_LIMITS, envelope.shape)
        options |= {"policy": "early_stop", "envelope": np.clip(envelope, -(2**31), INT32_MAX)}
    if rng.random() < 0.25:
        options["next_budget"] = rng.choice(INT32_LIMITS, 2)
        if rng.random() < 0.5:
            options["host_budget"] = torch.tensor([rng.integers(2**60)])
        if given and "policy" not in options and rng.random() < 0.7:
            options["policy"] = "history"
    return options


def random_case(seed: int, max_batch: int = 8, max_draft: int = 8) -> Case:
    """Draw every option on its own.

    Parameters
    ----------
    seed : int
        Decides everything.
    max_batch, max_draft : int
        Largest ``B`` and ``D``.
    """
    rng = np.random.default_rng(seed)
    batch, draft_len = int(rng.integers(0, max_batch + 1)), int(rng.integers(0, max_draft + 1))
    options, seq_lens = _paging(rng, batch)
    slots = batch
    if rng.random() < 0.3:
        slots = int(rng.integers(0, batch + 5))
        options["row_index"] = rng.integers(0, max(slots, 1), batch)
        if rng.random() < 0.3:
            options["row_index"] = _lengths(rng, batch, slots)
    for name in ("draft_lens", "min_keep", "max_keep"):
        if rng.random() < 0.3:
            options[name] = _lengths(rng, batch, draft_len)
    if rng.random() < 0.3:
        options["weight"] = [
            rng.uniform(0.2, 4, batch),
            2.0 ** rng.integers(-9, 10, batch),
            rng.choice(SPECIAL_WEIGHTS, batch),
        ][rng.integers(3)]
    if rng.random() < 0.25:
        options["base_lens"] = np.where(rng.random(batch) < 0.5, 1, rng.integers(-1, 9, batch))
        if rng.random() < 0.03:
            options["base_lens"] = rng.choice(INT32_LIMITS, batch)
        options["capacity"] = int(rng.integers(batch, 2 * batch * (draft_len + 2) + 2))
    elif rng.random() < 0.25:
        options["capacity"] = int(rng.integers(batch, batch * (draft_len + 2) + 2))
    if rng.random() < 0.3:
        options["num_reqs"] = _lengths(rng, 1, batch)
    if rng.random() < 0.3:
        options["score"] = "shifted"
    if rng.random() < 0.25:
        value = int(_lengths(rng, 1, batch * (draft_len + 1))[0])
        options["budget"] = value if rng.random() < 0.5 else torch.tensor([value], dtype=torch.int32)
    if rng.random() < 0.2:
        options["count_bonus"] = False
    log = bool(rng.random() < 0.2)
    if log:
        options["log_confidence"] = True
    ids = torch.int64 if rng.random() < 0.3 else torch.int32
    if rng.random() < 0.4:
        options["pad_token"] = int(rng.choice(INT64_LIMITS if ids is torch.int64 else INT32_LIMITS))
    budgets, costs = _tables(rng, batch, draft_len)
    confidence = _confidence(rng, (slots, draft_len), log)
    options |= _policy(rng, budgets, draft_len, "budget" in options)
    name = f"random-{seed}-{max_batch}x{max_draft}"
    return make(name, confidence, budgets, costs, ids=ids, seq_lens=seq_lens, seed=seed, **options)
