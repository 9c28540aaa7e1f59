"""The operators under torch's own checks, under `torch.compile`, and their fakes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic as Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

import dcut_kernels
from dcut_kernels import VerifyBatch, backends
from microbench.cases import make
from python_tests.compare import assert_same, pick

NAMES = [name for name in backends.available() if name != "cuda"]  # it takes no CPU tensors
NAMESPACES = ["dcut", *(f"dcut_{name}" for name in NAMES)]
OPERATORS = (
    "select_and_pack", "select_and_pack.out", "log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes"
)  # fmt: skip
BATCHES = (3, 7, 64, 300)
DRAFT_LEN, BUCKETS = 15, 5


def rows(batch: int, value: int) -> Tensor:
    return torch.full((batch,), value, dtype=torch.int32)


def inputs(batch: int, draft_len: int = DRAFT_LEN, **options: Any) -> dict[str, Any]:
    """A step whose sizes are all different, so that tracing cannot take one for another."""
    generator = torch.Generator().manual_seed(batch)
    budgets = [batch * (draft_len + 1) * (r + 1) // BUCKETS for r in range(BUCKETS)]
    confidence = torch.rand(batch, draft_len, generator=generator)
    return make("step", confidence, budgets, [10.0, 10.5, 12.0, 15.0, 20.0], seed=batch, **options).inputs


OPTION_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "rows": {
        "draft_lens": rows(6, 3), "min_keep": rows(6, 1), "max_keep": rows(6, 2), "weight": torch.full((6,), 0.7),
        "num_reqs": rows(1, 5), "row_index": torch.tensor([5, 0, 1, 9, 3, 2], dtype=torch.int32),
    },
    "paged": {
        "base_lens": rows(6, 2), "capacity": 40, "block_table": torch.arange(48, dtype=torch.int32).view(6, 8),
        "block_size": 16, "pad_token": 9, "ids": torch.int64, "score": "shifted",
    },
    "given": {"budget": rows(1, 9), "count_bonus": False, "log_confidence": True, "capacity": 11},
}  # fmt: skip


def calls(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of every operator, `.out` included, for one option set."""
    step = inputs(6, 4, **options)
    reference = backends.get("reference")
    prefix = reference.log_prefix_sum(**pick(reference.log_prefix_sum, step))
    keep = reference.select_and_pack(**step).keep_lens
    ids = step["draft_ids"].dtype
    out = VerifyBatch.allocate(6, 4, BUCKETS, step.get("capacity"), ids)._asdict()
    ranked = {"prefix": prefix, "budgets": step["budgets"]}
    return {
        "select_and_pack": step,
        "select_and_pack.out": step | out,
        "log_prefix_sum": pick(reference.log_prefix_sum, step),
        "segmented_topk": pick(reference.segmented_topk, step | ranked),
        "bucket_argmax": pick(reference.bucket_argmax, step | ranked),
        "pack_prefixes": pick(reference.pack_prefixes, step | {"keep_lens": keep}),
    }


def operator(namespace: str, name: str) -> torch._ops.OpOverload:
    op, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


def bound(op: torch._ops.OpOverload, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments, as the schema has them."""
    given, positional = dict(given), []
    for argument in op._schema.arguments:
        if not argument.kwarg_only:
            positional.append(given.pop(argument.name))
    return tuple(positional), given


@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_opcheck(namespace: str, name: str, options: str) -> None:
    op = operator(namespace, name)
    positional, keywords = bound(op, calls(OPTION_SETS[options])[name])
    results = torch.library.opcheck(op, positional, keywords)
    assert set(results.values()) == {"SUCCESS"}


def fused(step: dict[str, Any]) -> VerifyBatch:
    return dcut_kernels.select_and_pack(**step)


def int_budget(step: dict[str, Any]) -> VerifyBatch:
    return dcut_kernels.select_and_pack(**step, budget=20)


def device_budget(step: dict[str, Any]) -> VerifyBatch:
    return dcut_kernels.select_and_pack(**step, budget=step["budgets"][1:2], score="shifted", pad_token=3)


def symbolic_capacity(step: dict[str, Any]) -> VerifyBatch:
    return dcut_kernels.select_and_pack(**step, capacity=2 * step["bonus_ids"].shape[0] + 1)


def parts(step: dict[str, Any]) -> VerifyBatch:
    drafts = {name: step[name] for name in ("draft_ids", "bonus_ids", "seq_lens")}
    prefix = dcut_kernels.log_prefix_sum(step["confidence"])
    decision, gains = dcut_kernels.bucket_argmax(prefix, step["budgets"], step["costs"])
    keep_lens = dcut_kernels.segmented_topk(prefix, decision[1:2])[0]
    return dcut_kernels.pack_prefixes(keep_lens, **drafts)._replace(decision=decision, gains=gains)


def allocated(step: dict[str, Any]) -> VerifyBatch:
    batch, draft_len = step["confidence"].shape
    out = VerifyBatch.allocate(batch, draft_len, step["budgets"].shape[-1])
    return dcut_kernels.select_and_pack(**step, out=out)


def consumed(step: dict[str, Any]) -> tuple[Tensor, ...]:
    """What a model does with it: gather the hidden states of the verified positions."""
    batch = dcut_kernels.select_and_pack(**step)
    hidden = batch.token_ids.float() * 2 + batch.positions
    return hidden[batch.logits_indices], batch.cu_seqlens[-1]


def test_parts_equal_the_fused_operator() -> None:
    assert_same(parts(inputs(7)), fused(inputs(7)))


def check_compiled(function: Callable, backend: str, budget: Callable[[int], int] | None = None) -> None:
    """One graph for every batch, and the same answers as without compiling."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for batch in BATCHES:
        step = inputs(batch)
        if budget is not None:
            step["budget"] = budget(batch)
        for got, want in zip(compiled(step), function(step), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("function", [fused, int_budget, device_budget, symbolic_capacity, parts, allocated, consumed])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_once(backend: str, function: Callable) -> None:
    check_compiled(function, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_once_for_every_budget(backend: str) -> None:
    check_compiled(fused, backend, budget=lambda batch: 2 * batch + 5)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("function", [fused, parts])
def test_compiles_once_with_inductor(function: Callable) -> None:
    check_compiled(function, "inductor")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_out_compiles_once(backend: str) -> None:
    """`.out` into buffers that live outside the graph, with the batch marked as the dynamic size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def decode(step: dict[str, Any], out: VerifyBatch) -> Tensor:
        return dcut_kernels.select_and_pack(**step, out=out).token_ids + 1

    for batch in BATCHES:
        step, out = inputs(batch), VerifyBatch.allocate(batch, DRAFT_LEN, BUCKETS)
        for name in ("confidence", "draft_ids", "bonus_ids", "seq_lens"):
            torch._dynamo.mark_dynamic(step[name], 0)
        for t in out[:9]:
            torch._dynamo.mark_dynamic(t.fill_(-7), 0)
        result = decode(step, out)
        expected = fused(step)
        assert_same(out, expected)
        assert torch.equal(result, expected.token_ids + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("name", OPERATORS)
def test_fakes_have_the_real_shapes(name: str, options: str) -> None:
    real = calls(OPTION_SETS[options])[name]
    op = operator("dcut", name)
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(value) if isinstance(value, Tensor) else value for key, value in real.items()}
        got = op(**fake)
    want = op(**real)
    if name == "select_and_pack.out":
        assert got is want is None
        return
    for a, b in zip(*((r,) if isinstance(r, Tensor) else r for r in (got, want)), strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


def test_fakes_keep_symbolic_sizes() -> None:
    """A symbolic batch and capacity reach the shapes of the results without being guessed."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    by_batch = ("confidence", "draft_ids", "bonus_ids", "seq_lens")
    step, fake = inputs(7), {}
    with mode:
        for key, value in step.items():
            first = Dim.DYNAMIC if key in by_batch else Dim.STATIC
            sizes = [first, *[Dim.STATIC] * (value.dim() - 1)]
            fake[key] = mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        batch = fake["bonus_ids"].shape[0]
        assert isinstance(batch, torch.SymInt)
        for options, capacity in (({}, batch * (DRAFT_LEN + 1)), ({"capacity": 3 * batch}, 3 * batch)):
            got = VerifyBatch._make(torch.ops.dcut.select_and_pack(**fake, **options))
            first = {"keep_lens": batch, "kv_lens": batch, "cu_seqlens": batch + 1, "decision": 4, "gains": BUCKETS}
            for name, t in got._asdict().items():
                assert str(t.shape[0]) == str(first.get(name, capacity)), name
    assert env.guards == []


@pytest.mark.parametrize("backend", NAMES)
def test_gradients_stop_here(backend: str) -> None:
    """Confidences of a model in training mode are accepted, results carry no gradient."""
    step = inputs(7)
    step["confidence"].requires_grad_()
    batch = backends.get(backend).select_and_pack(**step)
    assert not any(t.requires_grad for t in batch)
    with torch.inference_mode():
        assert_same(backends.get(backend).select_and_pack(**inputs(7)), batch)
