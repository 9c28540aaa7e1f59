"""Checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "float": lambda dtype: dtype.is_floating_point,
    "int": lambda dtype: dtype in (torch.int32, torch.int64),
    "bool": lambda dtype: dtype == torch.bool,
    "int32": lambda dtype: dtype == torch.int32,
}


def tensor(name: str, value: Any, kind: str, shape: Sequence[int | str]) -> None:
    """Raise ``ValueError`` unless a tensor is of a kind and shape; a letter in `shape` stands for any size."""
    if isinstance(value, Tensor):
        fits = len(value.shape) == len(shape) and _KINDS[kind](value.dtype)
        if fits and all(want in (size, str(want)) for want, size in zip(shape, value.shape, strict=True)):
            return
        got = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    else:
        got = type(value).__name__
    raise ValueError(f"{name}: expected {kind} [{', '.join(map(str, shape))}], got {got}")


def positive(name: str, value: float, most: float = math.inf) -> float:
    """Raise ``ValueError`` unless a number is finite, above 0 and below `most`."""
    if not 0 < value < most:
        raise ValueError(f"{name}: expected a number between 0 and {most}, got {value}")
    return float(value)


def draft_length(value: int, most: int) -> int:
    """Raise ``ValueError`` unless a draft length is in range."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"draft_len: expected an int from 0 to {most}, got {value!r}")
    return value
