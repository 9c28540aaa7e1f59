"""Bad input is refused with one exact message, the same on every backend, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dcut_kernels
from dcut_kernels import VerifyBatch, backends
from microbench import cases
from python_tests.bad_calls import Bad, gapped, int32, policies

BATCH, DRAFT_LEN, BUCKETS = 3, 4, 5
CAPACITY = BATCH * (DRAFT_LEN + 1)
POISON = 77

VALID = cases.make(
    "valid", torch.full((BATCH, DRAFT_LEN), 0.5), budgets=[3, 6, 9, 12, 15], costs=[3.0, 3.5, 4.0, 5.0, 6.0]
).inputs
PARTS = {
    "select_and_pack": VALID,
    "log_prefix_sum": {"confidence": VALID["confidence"]},
    "segmented_topk": {"prefix": torch.arange(12, dtype=torch.int32).view(3, 4), "budgets": VALID["budgets"]},
    "bucket_argmax": {
        "prefix": torch.arange(12, dtype=torch.int32).view(3, 4),
        "budgets": VALID["budgets"],
        "costs": VALID["costs"],
    },
    "pack_prefixes": {"keep_lens": torch.tensor([1, 0, 4], dtype=torch.int32)}
    | {name: VALID[name] for name in ("draft_ids", "bonus_ids", "seq_lens")},
}
OPTIONS = {
    "select_and_pack": ["draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens", "num_reqs"],
    "segmented_topk": ["draft_lens", "min_keep", "max_keep", "weight", "base_lens", "num_reqs"],
    "bucket_argmax": ["draft_lens", "min_keep", "max_keep", "weight", "base_lens", "num_reqs"],
    "pack_prefixes": ["row_index", "base_lens", "num_reqs"],
}


def inputs() -> Iterator[Bad]:
    """Token inputs and confidences."""
    for op in ("select_and_pack", "pack_prefixes"):
        ids, bonus, seq_lens = (VALID[name] for name in ("draft_ids", "bonus_ids", "seq_lens"))
        yield Bad(op, "draft_ids: expected shape [*, *], got [12]", {"draft_ids": ids.view(-1)})
        yield Bad(op, "draft_ids: expected dtype int32 or int64, got int16", {"draft_ids": ids.short()})
        yield Bad(op, "draft_ids: expected dtype int32 or int64, got uint32", {"draft_ids": ids.to(torch.uint32)})
        yield Bad(op, "draft_ids: expected 3 rows, as bonus_ids, without row_index, got 4", {"draft_ids": int32(4, 4)})
        yield Bad(
            op, "draft_ids: expected at most 63 draft tokens a row, got 64",
            {"draft_ids": int32(3, 64), "confidence": torch.zeros(3, 64)},
        )  # fmt: skip
        yield Bad(
            op, "draft_ids: expected a contiguous tensor, got strides [8, 2] for shape [3, 4]",
            {"draft_ids": gapped(ids)},
        )  # fmt: skip
        yield Bad(op, "draft_ids: expected a tensor, got None", {"draft_ids": None})
        yield Bad(op, "bonus_ids: expected shape [*], got [3, 1]", {"bonus_ids": bonus.view(3, 1)})
        yield Bad(op, "bonus_ids: expected dtype int32, got int64", {"bonus_ids": bonus.long()})
        yield Bad(
            op, "bonus_ids: expected a contiguous tensor, got strides [2] for shape [3]", {"bonus_ids": gapped(bonus)}
        )
        yield Bad(op, "bonus_ids: expected a tensor, got None", {"bonus_ids": None})
        yield Bad(op, "seq_lens: expected shape [3], got [4]", {"seq_lens": int32(4)})
        yield Bad(op, "seq_lens: expected shape [3], got []", {"seq_lens": int32()})
        yield Bad(op, "seq_lens: expected dtype int32 or int64, got float32", {"seq_lens": seq_lens.float()})
        yield Bad(op, "seq_lens: expected a contiguous tensor, got strides [2] for shape [3]", {
            "seq_lens": gapped(seq_lens)
        })  # fmt: skip
        yield Bad(op, "seq_lens: expected a tensor, got None", {"seq_lens": None})
        yield Bad(op, "seq_lens: expected device cpu, got meta", {"seq_lens": seq_lens.to("meta")})
    yield Bad("pack_prefixes", "keep_lens: expected shape [3], got [2]", {"keep_lens": int32(2)})
    yield Bad("pack_prefixes", "keep_lens: expected dtype int32, got int64", {"keep_lens": int32(3).long()})
    yield Bad("pack_prefixes", "keep_lens: expected a tensor, got None", {"keep_lens": None})
    yield Bad(
        "pack_prefixes", "keep_lens: expected a contiguous tensor, got strides [2] for shape [3]",
        {"keep_lens": gapped(int32(3))},
    )  # fmt: skip
    for op, shape in (("select_and_pack", "[3, 4]"), ("log_prefix_sum", "[*, *]")):
        confidence = VALID["confidence"]
        yield Bad(op, f"confidence: expected shape {shape}, got [12]", {"confidence": confidence.view(-1)})
        yield Bad(
            op, "confidence: expected dtype float32, float16 or bfloat16, got float64",
            {"confidence": confidence.double()},
        )  # fmt: skip
        yield Bad(
            op, "confidence: expected dtype float32, float16 or bfloat16, got int32", {"confidence": confidence.int()}
        )
        yield Bad(
            op, "confidence: expected a contiguous tensor, got strides [1, 3] for shape [3, 4]",
            {"confidence": confidence.t().contiguous().t()},
        )  # fmt: skip
        yield Bad(
            op, "confidence: expected a contiguous tensor, got strides [0, 1] for shape [3, 4]",
            {"confidence": confidence[:1].expand(3, -1)},
        )  # fmt: skip
        yield Bad(
            op, "confidence: expected dtype float32, float16 or bfloat16, got float8_e4m3fn",
            {"confidence": confidence.to(torch.float8_e4m3fn)},
        )  # fmt: skip
    yield Bad("select_and_pack", "confidence: expected a tensor, got None", {"confidence": None})
    yield Bad(
        "select_and_pack", "confidence: expected shape [3, 4], got [3, 5]", {"confidence": torch.full((3, 5), 0.5)}
    )
    yield Bad(
        "log_prefix_sum", "confidence: expected at most 63 draft tokens a row, got 64",
        {"confidence": torch.zeros(2, 64)},
    )  # fmt: skip
    yield Bad("log_prefix_sum", "row_index: expected shape [*], got [2, 2]", {"row_index": int32(2, 2)})
    yield Bad("log_prefix_sum", "row_index: expected dtype int32, got int64", {"row_index": int32(2).long()})
    yield Bad("log_prefix_sum", "row_index: expected device cpu, got meta", {"row_index": int32(2).to("meta")})
    for op in ("segmented_topk", "bucket_argmax"):
        yield Bad(op, "prefix: expected shape [*, *], got [4]", {"prefix": int32(4)})
        yield Bad(op, "prefix: expected dtype int32, got float32", {"prefix": torch.zeros(3, 4)})
        yield Bad(op, "prefix: expected at most 63 draft tokens a row, got 70", {"prefix": int32(3, 70)})
        yield Bad(op, "prefix: expected a tensor, got None", {"prefix": None})
        yield Bad(
            op, "prefix: expected a contiguous tensor, got strides [1, 3] for shape [3, 4]", {"prefix": int32(4, 3).t()}
        )


def tables() -> Iterator[Bad]:
    """Bucket tables."""
    for op in ("select_and_pack", "segmented_topk", "bucket_argmax"):
        budgets = VALID["budgets"]
        yield Bad(op, "budgets: expected shape [R] or [M, R], got []", {"budgets": int32()})
        yield Bad(op, "budgets: expected shape [R] or [M, R], got [1, 1, 5]", {"budgets": int32(1, 1, 5)})
        yield Bad(op, "budgets: expected at least one row, got [0, 5]", {"budgets": int32(0, 5)})
        yield Bad(op, "budgets: expected dtype int32, got int64", {"budgets": budgets.long()})
        yield Bad(op, "budgets: expected dtype int32, got float32", {"budgets": budgets.float()})
        yield Bad(
            op, "budgets: expected at most 256 buckets, got 257", {"budgets": int32(257), "costs": torch.ones(257)}
        )
        yield Bad(op, "budgets: expected a tensor, got None", {"budgets": None})
        yield Bad(op, "budgets: expected device cpu, got meta", {"budgets": budgets.to("meta")})
        yield Bad(
            op, "budgets: expected a contiguous tensor, got strides [2] for shape [5]", {"budgets": gapped(budgets)}
        )
    for op in ("select_and_pack", "bucket_argmax"):
        costs = VALID["costs"]
        yield Bad(op, "costs: expected shape [R] or [M, R], got []", {"costs": torch.ones(())})
        yield Bad(op, "costs: expected 5 buckets, as in budgets, got [4]", {"costs": torch.ones(4)})
        yield Bad(op, "costs: expected 5 buckets, as in budgets, got [5, 1]", {"costs": torch.ones(5, 1)})
        yield Bad(op, "costs: expected at least one row, got [0, 5]", {"costs": torch.ones(0, 5)})
        yield Bad(
            op, "costs: expected 2 rows, as in budgets, got [3, 5]",
            {"budgets": int32(2, 5), "costs": torch.ones(3, 5)},
        )  # fmt: skip
        yield Bad(op, "costs: expected dtype float32, got float64", {"costs": costs.double()})
        yield Bad(op, "costs: expected dtype float32, got int32", {"costs": costs.int()})
        yield Bad(op, "costs: expected a contiguous tensor, got strides [2] for shape [5]", {"costs": gapped(costs)})
        yield Bad(op, "costs: expected a tensor, got None", {"costs": None})
        yield Bad(op, "budget: expected shape [1], got [2]", {"budget": int32(2)})
        yield Bad(op, "budget: expected shape [1], got []", {"budget": int32()})
        yield Bad(op, "budget: expected dtype int32, got int64", {"budget": int32(1).long()})


def row_options() -> Iterator[Bad]:
    """Optional inputs of one value a row."""
    for op, names in OPTIONS.items():
        for name in names:
            size = 1 if name == "num_reqs" else BATCH
            good, dtype, wrong = int32(size), "int32", "int64"
            if name == "weight":
                good, dtype, wrong = good.float(), "float32", "float16"
            fine = {"capacity": CAPACITY, name: good}
            yield Bad(op, f"{name}: expected shape [{size}], got [4]", fine | {name: good.new_ones(4)})
            yield Bad(op, f"{name}: expected shape [{size}], got []", fine | {name: good.new_ones(())})
            yield Bad(op, f"{name}: expected dtype {dtype}, got {wrong}", fine | {name: good.to(getattr(torch, wrong))})
            yield Bad(op, f"{name}: expected device cpu, got meta", fine | {name: good.to("meta")})
            if size > 1:
                yield Bad(
                    op, f"{name}: expected a contiguous tensor, got strides [2] for shape [3]",
                    fine | {name: gapped(good)},
                )  # fmt: skip


def modes() -> Iterator[Bad]:
    """Names, paging, pad token, capacity, calibration and policies."""
    for op in ("select_and_pack", "log_prefix_sum"):
        yield Bad(op, "score: expected 'inclusive' or 'shifted', got 'Inclusive'", {"score": "Inclusive"})
        yield Bad(op, "score: expected 'inclusive' or 'shifted', got ''", {"score": ""})
        entries = int32(4, 65)
        for bad, problem in (
            (int32(4, 64), "shape [4, 65], got [4, 64]"),
            (int32(65), "shape [4, 65], got [65]"),
            (entries.long(), "dtype int32, got int64"),
            (entries.to("meta"), "device cpu, got meta"),
            (gapped(entries), "a contiguous tensor, got strides [130, 2] for shape [4, 65]"),
        ):
            yield Bad(op, f"calibration: expected {problem}", {"calibration": bad})
    for op in ("select_and_pack", "bucket_argmax"):
        yield from policies(op)
    for op in ("select_and_pack", "pack_prefixes"):
        table = int32(3, 8)
        for size in (0, -1, 1 << 31):
            yield Bad(
                op, f"block_size: expected 1 to 2147483647 with a block_table, got {size}",
                {"block_table": table, "block_size": size},
            )  # fmt: skip
        for bad, problem in (
            (int32(8), "shape [3, *], got [8]"),
            (int32(2, 8), "shape [3, *], got [2, 8]"),
            (table.long(), "dtype int32, got int64"),
            (gapped(table), "a contiguous tensor, got strides [16, 2] for shape [3, 8]"),
        ):
            yield Bad(op, f"block_table: expected {problem}", {"block_table": bad, "block_size": 16})
        for token in (1 << 31, -(1 << 31) - 1):
            yield Bad(op, f"pad_token: expected a value of int32, as draft_ids, got {token}", {"pad_token": token})
    for op in ("select_and_pack", "segmented_topk", "bucket_argmax", "pack_prefixes"):
        for capacity in (2, 0, -1, 1 << 31):
            message = f"capacity: expected 3 (the batch) to 2147483647, got {capacity}"
            yield Bad(op, message, {"capacity": capacity})
        if op != "select_and_pack":
            message = "capacity: expected a value, since base_lens is given, got None"
            yield Bad(op, message, {"base_lens": int32(3)})


def out_buffers() -> Iterator[Bad]:
    """Buffers that do not fit the call."""
    op, packed = "select_and_pack", CAPACITY
    for name, t in VerifyBatch.allocate(BATCH, DRAFT_LEN, BUCKETS)._asdict().items():
        dtype = str(t.dtype).removeprefix("torch.")
        wrong, size = t.to(torch.int64 if dtype == "int32" else torch.int32), len(t)
        if name != "token_ids":
            longer = t.new_zeros(size + 1)
            yield Bad(op, f"{name}: expected shape [{size}], got [{size + 1}]", out={name: longer})
            yield Bad(op, f"{name}: expected shape [{size}], got [1, {size}]", out={name: t[None]})
        yield Bad(op, f"{name}: expected dtype {dtype}, got {wrong.dtype}".replace("torch.", ""), out={name: wrong})
        yield Bad(
            op, f"{name}: expected a contiguous tensor, got strides [2] for shape [{size}]", out={name: gapped(t)}
        )
        yield Bad(op, f"{name}: expected device cpu, got meta", out={name: t.to("meta")})
        yield Bad(op, f"{name}: expected a tensor, got None", out={name: None})
    yield Bad(op, f"token_ids: expected shape [*], got [1, {packed}]", out={"token_ids": int32(1, packed)})
    yield Bad(op, f"positions: expected shape [14], got [{packed}]", out={"token_ids": int32(14)})
    yield Bad(op, "capacity: expected 3 (the batch) to 2147483647, got 2", out={"token_ids": int32(2)})
    yield Bad(op, f"capacity: expected {packed}, the size of out's token_ids, got 14", {"capacity": 14}, {})


BAD = [*inputs(), *tables(), *row_options(), *modes(), *out_buffers()]
NAMES = [name for name in backends.available() if name != "cuda"]  # it takes no CPU tensors
NAMESPACES = {"public": "dcut"} | {name: f"dcut_{name}" for name in NAMES}
FUNCTIONS = {"public": dcut_kernels} | {name: backends.get(name) for name in NAMES}
FIRST = [next(bad for bad in BAD if bad.op == op) for op in PARTS]


def poisoned() -> VerifyBatch:
    return VerifyBatch(*(t.fill_(POISON) for t in VerifyBatch.allocate(BATCH, DRAFT_LEN, BUCKETS)))


def message_of(call: Callable, **args: Any) -> str:
    with pytest.raises(RuntimeError) as failure:
        call(**args)
    assert failure.type is RuntimeError
    return str(failure.value)


def assert_untouched(out: VerifyBatch) -> None:
    for name, t in out._asdict().items():
        if t is not None and not t.is_meta:
            assert t.unique().tolist() in ([POISON], [0], [1]), f"{name} was written: {t}"


def accepted(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `args` that `op` takes."""
    schema = getattr(torch.ops.dcut, op).default._schema
    return {name: value for name, value in args.items() if name in [a.name for a in schema.arguments]}


@pytest.mark.parametrize("surface", FUNCTIONS)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_refused(bad: Bad, surface: str) -> None:
    function = getattr(FUNCTIONS[surface], bad.op)
    op = getattr(getattr(torch.ops, NAMESPACES[surface]), bad.op)
    args = accepted(bad.op, PARTS[bad.op] | bad.args)
    if bad.out is None:
        assert message_of(function, **args) == bad.message
        assert message_of(op.default, **args) == bad.message
    if bad.op == "select_and_pack":
        out = poisoned()._replace(**bad.out or {})
        assert message_of(function, **args, out=out) == bad.message
        assert message_of(op.out, **args, **out._asdict()) == bad.message
        assert_untouched(out)
    if surface == "triton" and not any(bad is first for first in FIRST):
        return  # its interpreter is slow
    for got, want in zip(flat(function(**PARTS[bad.op])), expected(bad.op), strict=True):
        assert torch.equal(got, want)


def flat(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@cache
def expected(op: str) -> tuple[Tensor, ...]:
    return flat(getattr(backends.get("reference"), op)(**PARTS[op]))


def test_table_is_wide() -> None:
    """Kinds of mistakes, counted without the values that came."""
    assert len({(bad.op, bad.message.split(", got")[0]) for bad in BAD}) > 100


@pytest.mark.parametrize("surface", FUNCTIONS)
def test_base_lens_needs_a_capacity(surface: str) -> None:
    select = FUNCTIONS[surface].select_and_pack
    message = "capacity: expected a value, since base_lens is given, got None"
    assert message_of(select, **VALID, base_lens=int32(3)) == message
    out = VerifyBatch.allocate(BATCH, DRAFT_LEN, BUCKETS, capacity=20)
    assert select(**VALID, base_lens=int32(3), out=out) is out  # out has one


@pytest.mark.parametrize("surface", FUNCTIONS)
@pytest.mark.parametrize("op", ["select_and_pack", "bucket_argmax"])
def test_budget_value(op: str, surface: str) -> None:
    function = getattr(FUNCTIONS[surface], op)
    for budget in (1 << 31, -(1 << 31) - 1):
        message = f"budget: expected a value of int32, got {budget}"
        assert message_of(function, **PARTS[op], budget=budget) == message
    assert function(**PARTS[op], budget=np.int32(5)) is not None
    for wrong in (1.5, True, "3"):
        message = f"budget: expected an int or an int32 tensor, got {type(wrong).__name__}"
        assert message_of(function, **PARTS[op], budget=wrong) == message
    first = next(iter(PARTS[op]))  # an int goes to its device
    assert message_of(function, **PARTS[op] | {first: [0.5]}, budget=5) == f"{first}: expected a tensor, got list"


@pytest.mark.parametrize("surface", FUNCTIONS)
def test_out_is_a_verify_batch(surface: str) -> None:
    out = poisoned()
    for wrong in (tuple(out), list(out), out.token_ids):
        message = f"out: expected a VerifyBatch, got {type(wrong).__name__}"
        assert message_of(FUNCTIONS[surface].select_and_pack, **VALID, out=wrong) == message
    assert_untouched(out)


def test_int64_ids_take_any_pad_token() -> None:
    ids = {name: VALID[name].long() for name in ("draft_ids", "bonus_ids")}
    for name in NAMES:
        batch = backends.get(name).select_and_pack(**VALID | ids, pad_token=-(1 << 63), capacity=20)
        assert batch.token_ids[-1] == -(1 << 63)


def test_allocate() -> None:
    message = "capacity: expected 4 (the batch) to 2147483647, got 2"
    assert message_of(VerifyBatch.allocate, batch=4, draft_len=4, buckets=1, capacity=2) == message
    sizes = {"batch": 4, "draft_len": 4, "buckets": 1}
    most = {"batch": 2**31 - 1, "draft_len": 63, "buckets": 256}
    for name, wrong in [("batch", "4"), ("batch", -1), ("draft_len", 64), ("buckets", 257)]:
        message = f"{name}: expected an int from 0 to {most[name]}, got {wrong!r}"
        assert message_of(VerifyBatch.allocate, **sizes | {name: wrong}) == message
    message = "ids_dtype: expected torch.int32 or torch.int64, got torch.float32"
    assert message_of(VerifyBatch.allocate, **sizes, ids_dtype=torch.float32) == message
