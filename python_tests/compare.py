"""What the tests and the fuzzer need to compare two backends integer by integer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from dcut_kernels import VerifyBatch, _load
from dcut_kernels.ops import Backend
from microbench.cases import Case

POISON = -0x21524111  # in no input and no result
MARGIN = 32  # entries before and after a poisoned buffer


@cache
def instruction_sets() -> list[str]:
    """Instruction sets of the compiled kernel that this machine has."""
    found, start = [], _load.cpu_isa()
    for name in _load._ISAS:
        try:
            found.append(_load.cpu_isa(name))
        except RuntimeError:
            continue
    _load.cpu_isa(start)
    return found


@cache
def _parameters(name: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(Backend, name)).parameters)


def pick(function: Callable, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one function of a backend out of those of `select_and_pack`."""
    names = _parameters(function.__name__)
    return {name: value for name, value in inputs.items() if name in names}


def composed(backend: Backend, inputs: Mapping[str, Any]) -> VerifyBatch:
    """The fused operation put together from its four parts."""
    prefix = backend.log_prefix_sum(**pick(backend.log_prefix_sum, inputs))
    decision, gains = backend.bucket_argmax(prefix, **pick(backend.bucket_argmax, inputs))
    inner = pick(backend.segmented_topk, inputs) | {"budgets": decision[1:2]}
    keep_lens = backend.segmented_topk(prefix, **inner)[0]
    batch = backend.pack_prefixes(keep_lens, **pick(backend.pack_prefixes, inputs))
    return batch._replace(decision=decision, gains=gains)


def poisoned(case: Case, value: int = POISON) -> VerifyBatch:
    """Output buffers of a case, and some memory around each, full of a value that no result holds."""
    ids = case.inputs["draft_ids"].dtype
    like = VerifyBatch.allocate(case.batch, case.draft_len, case.buckets, case.capacity, ids)
    return VerifyBatch(*(torch.full((len(t) + 2 * MARGIN,), value, dtype=t.dtype)[MARGIN:-MARGIN] for t in like))


def spilled(out: VerifyBatch, value: int = POISON) -> str | None:
    """Name the first of poisoned buffers that was written beyond its ends, or None."""
    for name, tensor in out._asdict().items():
        around = tensor._base[:MARGIN], tensor._base[-MARGIN:]
        if any((part != value).any() for part in around):
            return f"{name}: written beyond its ends"
    return None


def first_difference(got: VerifyBatch, expected: VerifyBatch) -> str | None:
    """Name the first field and coordinate that differ, or None."""
    for name, a, b in zip(VerifyBatch._fields, got, expected, strict=True):
        difference = tensor_difference(name, a, b)
        if difference:
            return difference
    return None


def tensor_difference(name: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"{name}: {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
    if torch.equal(got, expected):
        return None
    where = (got != expected).nonzero()
    at = tuple(where[0].tolist())
    return f"{name}{list(at)}: {got[at].item()}, expected {expected[at].item()}, in {len(where)} places"


def assert_same(got: VerifyBatch, expected: VerifyBatch) -> None:
    difference = first_difference(got, expected)
    assert difference is None, difference
