"""Checks of values, in the words of this package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from .._check import INT32_MAX
from .._schema import MAX_TOKENS_CPU


def require(name: str, holds: bool, expected: object, got: object) -> None:
    """Raise ``ValueError`` unless a condition holds."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def integer(name: str, value: Any, least: int = 1, most: int = INT32_MAX) -> int:
    """An int from `least` to `most`."""
    fits = isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most
    require(name, fits, f"an int from {least} to {most}", repr(value))
    return int(value)


def number(name: str, value: Any) -> float:
    """A float, NaN and infinities included."""
    require(name, isinstance(value, Real) and not isinstance(value, bool), "a number", repr(value))
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that a float holds, got one of more digits") from None


def sequence(name: str, value: Any) -> Sequence[Any]:
    """A list or tuple."""
    require(name, isinstance(value, list | tuple), "a list", repr(value))
    return value


def batch_sizes(value: Any) -> tuple[int, ...]:
    """Batches, at least one, ascending."""
    batches = tuple(integer("batches", batch, 1, MAX_TOKENS_CPU) for batch in sequence("batches", value))
    ascending = bool(batches) and all(a < b for a, b in pairwise(batches))
    require("batches", ascending, "at least one batch, strictly ascending", list(batches))
    return batches


def powers_up_to(most: int) -> list[int]:
    """Powers of two below `most`, and `most`: sizes to measure."""
    return [1 << k for k in range((most - 1).bit_length())] + [most]
