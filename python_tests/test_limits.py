"""The largest sizes: what one call takes on the CPU, what one launch takes on a GPU, and where indices end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dcut_kernels import VerifyBatch, backends
from python_tests.test_errors import FUNCTIONS, NAMESPACES, PARTS, flat, int32, message_of

ONE_LAUNCH = ("simt", "triton")
surfaces = pytest.mark.parametrize("surface", FUNCTIONS)
operators = pytest.mark.parametrize("op", PARTS)


def sized(op: str, batch: int, draft_len: int) -> tuple[str, dict[str, Tensor]]:
    """The argument that decides the sizes of a call, and the arguments of a call of that size."""
    confidence, prefix = torch.zeros(batch, draft_len), int32(batch, draft_len)
    drafts = {"draft_ids": prefix, "bonus_ids": int32(batch), "seq_lens": int32(batch)}
    name, args = {
        "select_and_pack": ("draft_ids", drafts | {"confidence": confidence}),
        "log_prefix_sum": ("confidence", {"confidence": confidence}),
        "segmented_topk": ("prefix", {"prefix": prefix}),
        "bucket_argmax": ("prefix", {"prefix": prefix}),
        "pack_prefixes": ("draft_ids", drafts | {"keep_lens": int32(batch)}),
    }[op]
    return name, PARTS[op] | args


def refusals(surface: str, op: str, args: dict[str, Tensor]) -> set[str]:
    """The messages of every way to call an operator."""
    function, packet = getattr(FUNCTIONS[surface], op), getattr(getattr(torch.ops, NAMESPACES[surface]), op)
    found = {message_of(function, **args), message_of(packet.default, **args)}
    if op == "select_and_pack":
        out = VerifyBatch.allocate(3, 4, 5)  # of another size: it is the inputs that are too large
        found |= {message_of(function, **args, out=out), message_of(packet.out, **args, **out._asdict())}
    return found


@surfaces
@operators
def test_one_call(op: str, surface: str) -> None:
    name, args = sized(op, 1 << 24, 0)
    message = "expected batch * (draft tokens + 1) below 16777216, got 16777216"
    if surface in ONE_LAUNCH:
        message = "expected at most 4096 requests in one GPU launch, got 16777216"
    assert refusals(surface, op, args) == {f"{name}: {message}"}


@surfaces
@operators
@pytest.mark.parametrize(
    ("batch", "draft_len", "message"),
    [
        (4097, 0, "expected at most 4096 requests in one GPU launch, got 4097"),
        (4096, 17, "expected batch * draft tokens at most 65536 in one GPU launch, got 69632"),
        (1041, 63, "expected batch * draft tokens at most 65536 in one GPU launch, got 65583"),
    ],
)
def test_one_launch(batch: int, draft_len: int, message: str, op: str, surface: str) -> None:
    """What one launch on a GPU does not take; the CPU does."""
    name, args = sized(op, batch, draft_len)
    if surface in ONE_LAUNCH:
        assert refusals(surface, op, args) == {f"{name}: {message}"}
    elif surface != "reference":
        assert flat(getattr(FUNCTIONS[surface], op)(**args))


@operators
@pytest.mark.skipif("simt" not in FUNCTIONS, reason="the emulated CUDA kernel is not built")
def test_largest_launch(op: str) -> None:
    _, args = sized(op, 4096, 16)
    results = (flat(getattr(FUNCTIONS[name], op)(**args)) for name in ("simt", "public"))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


@pytest.mark.parametrize("surface", FUNCTIONS)
def test_slots_limit(surface: str, tmp_path: Path) -> None:
    """A table of 2^31 drafts or more, in a sparse file."""
    slots = (1 << 31) // 63 + 1
    sparse = tmp_path / "sparse"
    table = torch.from_file(str(sparse), shared=True, size=slots * 63, dtype=torch.bfloat16)
    sparse.unlink()
    message = f"confidence: expected slots * draft tokens at most 2147483647, got {slots * 63}"
    args = {"confidence": table.view(slots, 63), "row_index": int32(1)}
    assert message_of(FUNCTIONS[surface].log_prefix_sum, **args) == message
    if surface != "reference" and backends.chosen() == "cpu":  # the reference would list every draft
        fits = table[: (slots - 1) * 63].view(slots - 1, 63)
        assert FUNCTIONS[surface].log_prefix_sum(fits, row_index=int32(1)).unique().tolist() == [2**26 - 1]
