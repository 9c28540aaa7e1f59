"""Confidences from logits: against float64, on every backend, whatever the logits hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dcut_kernels
from dcut_kernels import _confidence, _load, backends
from dcut_kernels._schema import STATISTICS
from python_tests.bad_calls import gapped
from python_tests.child import answer_of
from python_tests.compare import instruction_sets

VARIANTS = ["reference", *([] if _load.missing("cpu") else [f"cpu-{isa}" for isa in instruction_sets()])]
VARIANTS += [] if _load.missing("triton") else ["triton"]
NAMES = sorted({name.partition("-")[0] for name in VARIANTS})
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = torch.inf, torch.nan
FLOAT32_MAX = float(np.finfo(np.float32).max)
needs_triton = pytest.mark.skipif(_load.missing("triton") is not None, reason="triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in Triton's interpreter


@pytest.fixture(params=VARIANTS)
def confidence(request: pytest.FixtureRequest) -> Iterator[Callable[..., dcut_kernels.DraftConfidence]]:
    """The function of each backend, the compiled one with each instruction set."""
    name, _, isa = request.param.partition("-")
    start = _load.cpu_isa(isa) and isa if isa else None
    yield backends.get(name).draft_confidence
    if start:
        _load.cpu_isa(instruction_sets()[-1])


def exact_row(x: np.ndarray, temperature: float, given: int | None) -> tuple[int, list[float]]:
    """Token and statistics of one row in float64, the largest logit apart from the sums."""
    x = np.minimum(np.where(np.isnan(x), -np.inf, x), FLOAT32_MAX)
    best = int(x.argmax())
    token = best if given is None else given
    if x[best] == -np.inf:
        return token, [-np.inf, 0.0, 0.0, 0.0]
    t = min(max(temperature, 2.0**-100), 2.0**100) if temperature > 0 else 1.0
    y = (x - x[best]) / t
    others = np.exp(np.delete(y, best))
    total = 1.0 + others.sum()
    log_prob = y[token] - np.log1p(others.sum()) if 0 <= token < len(x) else -np.inf
    margin = -np.expm1(np.delete(y, best).max(initial=-np.inf)) / total
    return token, [log_prob, 1.0 / total, (1.0 + (others**2).sum()) / total**2, margin]


def exact(logits: Tensor, temperature: Tensor | None = None, draft_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    batch, draft_len, _ = logits.shape
    ids = torch.empty(batch, draft_len, dtype=torch.int64)
    values = torch.empty(len(STATISTICS), batch, draft_len, dtype=torch.float64)
    for i in range(batch):
        for k in range(draft_len):
            t = 1.0 if temperature is None else float(temperature[k])
            given = None if draft_ids is None else int(draft_ids[i, k])
            ids[i, k], row = exact_row(logits[i, k].double().numpy(), t, given)
            values[:, i, k] = torch.tensor(row, dtype=torch.float64)
    return ids, values


def check(confidence: Callable[..., Any], logits: Tensor, **options: Tensor) -> None:
    got = confidence(logits, statistics=STATISTICS, **options)
    ids, values = exact(logits, **options)
    assert got.draft_ids.dtype == torch.int64
    assert torch.equal(got.draft_ids, ids)
    torch.testing.assert_close(got.values, values.float(), rtol=1e-5, atol=1e-12)


def random(*shape: int, seed: int = 0, spread: float = 4.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def rows(*given: Tensor | Sequence[float]) -> Tensor:
    """Logits [1, D, V] from D rows."""
    return torch.stack([torch.as_tensor(row, dtype=torch.float32) for row in given])[None]


def at(vocab: int, floor: float, **values: float) -> Tensor:
    """A row of `floor` but for some tokens, such as ``v7=3.0``."""
    row = torch.full((vocab,), floor)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 100, 2049, 4095, 4096, 4097, 8200])
def test_every_width(vocab: int, dtype: torch.dtype, confidence: Callable) -> None:
    check(confidence, random(2, 3, vocab, seed=vocab).to(dtype))


SPREAD = {
    "flat": rows(at(5000, 2.5), at(5000, -1e30), at(5000, 0.0)),
    "peaked": rows(at(5000, 0.0, v4321=30.0), at(5000, -20.0, v1=0.1), random(5000) - 60 * (torch.arange(5000) != 7)),
    "rising": rows(torch.linspace(-30, 30, 9000), torch.linspace(30, -30, 9000), torch.arange(9000.0)),
    "ties": rows(at(9000, 0.0, v5=7.0, v8000=7.0), at(9000, 0.0, v8191=7.0, v8192=7.0), at(9000, 0.0, v0=7.0, v1=7.0)),
    "near-ties": rows(at(50, -9.0, v3=10.0, v4=10.000001), at(50, -9.0, v3=1e-38, v40=0.0), at(50, -1.0, v7=-1e-7)),
    "huge": rows(at(99, -1e30, v50=1e30, v3=9.9e29), at(99, -FLOAT32_MAX, v2=FLOAT32_MAX), random(99) * 1e30),
    "infinite": rows(at(99, 3.0, v50=INF), at(99, INF), at(99, -INF, v98=INF)),
    "masked": rows(at(5000, -INF, v4999=3.0), at(5000, -INF, v7=1.0, v4500=2.0), at(5000, 0.0, v7=-INF, v8=-INF)),
    "nan": rows(at(5000, 1.0, v0=NAN, v9=2.0), at(5000, NAN, v4998=-5.0), at(5000, -INF, v3=NAN, v5=0.0)),
    "empty": rows(at(4100, -INF), at(4100, NAN), at(4100, -INF, v9=NAN)),
    "far-below": rows(at(5000, -41.0, v0=0.0), at(5000, -42.0, v0=0.0), at(5000, -90.0, v4999=0.0)),
    "finite-floor": rows(at(20, -FLOAT32_MAX), at(20, -INF, v3=-FLOAT32_MAX), at(20, -FLOAT32_MAX, v3=-1e38)),
}


@pytest.mark.parametrize("name", SPREAD)
def test_every_kind_of_logits(name: str, confidence: Callable) -> None:
    check(confidence, SPREAD[name])
    check(confidence, SPREAD[name], temperature=torch.tensor([0.3, 1.0, 2.0]))
    check(confidence, SPREAD[name], draft_ids=torch.tensor([[3, 9, 7]]))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_kind_of_narrow_logits(dtype: torch.dtype, confidence: Callable) -> None:
    """Subnormals, infinities, NaN and the largest values of the narrow types."""
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    logits = rows(at(40, tiny, v5=3 * tiny), at(40, NAN, v39=-tiny), at(40, -top, v20=top), at(40, 0.0, v9=INF))
    check(confidence, logits.to(dtype))
    check(confidence, logits.to(dtype), temperature=torch.tensor([tiny, 1.0, 2.0**60, 1.0]))


def test_temperature(confidence: Callable) -> None:
    """0 and below and NaN count as 1; the others are clamped."""
    temperature = torch.tensor([0.5, 3.0, 0.0, -2.0, NAN, INF, -INF, 1e-45, 1e-30, 3e38])
    check(confidence, random(2, 10, 777), temperature=temperature)
    alike = confidence(
        random(1, 1, 777).expand(1, 4, 777).contiguous(), temperature=torch.tensor([1.0, 0.0, -1.0, NAN])
    )
    assert alike.values.unique().numel() == 1


def test_given_tokens(confidence: Callable) -> None:
    """Outside the vocabulary they are harmless: their log-probability is -inf, the rest as ever."""
    logits = random(2, 5, 300)
    logits[1, 1, 42] = -INF
    wide = 1 << 40
    given = torch.tensor([[0, 299, 17, 300, -1], [wide, 42, -wide, torch.iinfo(torch.int64).max, -(1 << 63)]])
    check(confidence, logits, draft_ids=given)
    got = confidence(logits, draft_ids=given)
    assert got.values[0].isinf().tolist() == [[False] * 3 + [True] * 2, [True] * 5]
    assert got.draft_ids.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("order", [(), ("margin",), ("collision", "log_prob"), STATISTICS[::-1], ("margin", "margin")])
def test_order_of_statistics(order: tuple[str, ...], confidence: Callable) -> None:
    logits = random(2, 3, 100)
    every = confidence(logits, statistics=STATISTICS).values
    values = confidence(logits, statistics=order).values
    assert values.shape == (len(order), 2, 3)
    assert all(torch.equal(value, every[STATISTICS.index(name)]) for value, name in zip(values, order, strict=True))


def test_default_is_the_log_probability(confidence: Callable) -> None:
    logits = random(2, 3, 100)
    assert torch.equal(confidence(logits).values, confidence(logits, statistics=["log_prob"]).values)


@pytest.mark.parametrize("shape", [(0, 4, 10), (3, 0, 10), (0, 0, 1)], ids=str)
def test_no_rows(shape: tuple[int, int, int], confidence: Callable) -> None:
    got = confidence(torch.empty(shape), statistics=("margin", "log_prob"))
    assert got.draft_ids.shape == shape[:2]
    assert got.values.shape == (2, *shape[:2])


def test_select_and_pack_takes_it_as_it_is(confidence: Callable) -> None:
    logits = random(4, 5, 2000, spread=6.0)
    budgets, costs = torch.tensor([8, 12, 24], dtype=torch.int32), torch.tensor([1.0, 1.2, 2.0])
    got = confidence(logits)
    tokens = got.draft_ids, got.draft_ids[:, 0].contiguous(), torch.arange(4), budgets, costs
    batch = dcut_kernels.select_and_pack(got.values[0], *tokens, log_confidence=True)
    ids, values = exact(logits)
    best = dcut_kernels.select_and_pack(values[0].float(), ids, *tokens[1:], log_confidence=True)
    assert torch.equal(batch.keep_lens, best.keep_lens)
    assert 0 < int(batch.keep_lens.sum()) < 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 4103])
def test_nothing_depends_on_what_memory_held(vocab: int, dtype: torch.dtype, confidence: Callable) -> None:
    """Neither around the logits nor in the results' buffers."""
    logits = random(2, 3, vocab, seed=3).to(dtype)
    alone = confidence(logits, statistics=STATISTICS)
    for poison in (NAN, 60000.0, -INF):
        memory = torch.full((logits.numel() + 200,), poison, dtype=dtype)
        inside = memory[101 : 101 + logits.numel()].view(logits.shape).copy_(logits)
        old = [torch.full((n,), poison) for n in (6, 12, 24) for _ in range(20)]
        del old
        got = confidence(inside, statistics=STATISTICS)
        assert torch.equal(got.draft_ids, alone.draft_ids)
        assert torch.equal(got.values, alone.values)


@pytest.mark.skipif(_load.missing("cpu") is not None, reason="only the reference is built")
def test_threads_change_nothing() -> None:
    logits, threads = random(5, 7, 9000), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(backends.get("cpu").draft_confidence(logits, statistics=STATISTICS))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, results[0], strict=True))


@pytest.mark.skipif(_load.missing("cpu") is not None, reason="only the reference is built")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_no_call_keeps_memory() -> None:
    """In a process of its own, whose heap has no room left by others."""
    script = f"""
import torch
from dcut_kernels import backends
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
options = {{"temperature": torch.ones(2), "draft_ids": torch.zeros(1, 2, dtype=torch.int64)}}
logits, grown, confidence = torch.zeros(1, 2, 4), [], backends.get("cpu").draft_confidence
for _ in range(4):
    before = resident()
    for _ in range(10_000):
        confidence(logits, statistics={STATISTICS}, **options)
    grown.append(resident() - before)
print(min(grown))
"""
    assert answer_of(script) < 10_000 * 16


class Bad(NamedTuple):
    message: str
    args: dict[str, Any]


LOGITS = torch.zeros(2, 3, 5)
BAD = [
    Bad("logits: expected shape [*, *, *], got [6, 5]", {"logits": LOGITS.view(6, 5)}),
    Bad("logits: expected dtype float32, float16 or bfloat16, got float64", {"logits": LOGITS.double()}),
    Bad(
        "logits: expected a contiguous tensor, got strides [30, 10, 2] for shape [2, 3, 5]", {"logits": gapped(LOGITS)}
    ),
    Bad("logits: expected at most 63 draft tokens a row, got 64", {"logits": torch.zeros(1, 64, 2)}),
    Bad("logits: expected a vocabulary of 1 to 2147483647 tokens, got 0", {"logits": torch.zeros(2, 3, 0)}),
    Bad(
        "logits: expected a vocabulary of 1 to 2147483647 tokens, got 2147483648",
        {"logits": torch.zeros(0, 3, 1 << 31)},
    ),
    Bad("temperature: expected shape [3], got [2]", {"temperature": torch.ones(2)}),
    Bad("temperature: expected shape [3], got []", {"temperature": torch.ones(())}),
    Bad("temperature: expected dtype float32, got float64", {"temperature": torch.ones(3).double()}),
    Bad(
        "temperature: expected a contiguous tensor, got strides [2] for shape [3]",
        {"temperature": gapped(torch.ones(3))},
    ),
    Bad("temperature: expected device cpu, got meta", {"temperature": torch.ones(3, device="meta")}),
    Bad("draft_ids: expected shape [2, 3], got [3, 2]", {"draft_ids": torch.ones(3, 2, dtype=torch.int64)}),
    Bad("draft_ids: expected dtype int64, got int32", {"draft_ids": torch.ones(2, 3, dtype=torch.int32)}),
    Bad("draft_ids: expected device cpu, got meta", {"draft_ids": torch.ones(2, 3, dtype=torch.int64, device="meta")}),
    Bad(
        "statistics: expected 'log_prob', 'max_prob', 'collision' or 'margin', got 'entropy'",
        {"statistics": ["margin", "entropy"]},
    ),
]


def message_of(function: Callable, **args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        function(**args)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("name", ["public", *NAMES])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.message.replace(" ", "_"))
def test_refused(bad: Bad, name: str) -> None:
    functions = dcut_kernels if name == "public" else backends.get(name)
    namespace = torch.ops.dcut if name == "public" else getattr(torch.ops, f"dcut_{name}")
    args = {"logits": LOGITS, "statistics": ["log_prob"]} | bad.args
    assert message_of(functions.draft_confidence, **args) == bad.message
    assert message_of(namespace.draft_confidence.default, **args) == bad.message


@pytest.mark.parametrize("name", ["public", *NAMES])
@pytest.mark.parametrize("wrong", [None, 3, [[[1.0]]], np.zeros((2, 3, 5), np.float32)], ids=lambda x: type(x).__name__)
def test_logits_are_a_tensor(wrong: object, name: str) -> None:
    function = (dcut_kernels if name == "public" else backends.get(name)).draft_confidence
    message = f"logits: expected a tensor, got {'None' if wrong is None else type(wrong).__name__}"
    assert message_of(function, logits=wrong) == message


def test_one_name_is_not_a_sequence() -> None:
    message = "statistics: expected a sequence of names, got 'margin'"
    assert message_of(dcut_kernels.draft_confidence, logits=LOGITS, statistics="margin") == message


@pytest.mark.skipif(_load.missing("simt") is not None, reason="simt is not built")
def test_simt_has_none() -> None:
    message = "backend 'simt' has no draft_confidence: it executes CUDA source, and this operator has none"
    assert message_of(backends.get("simt").draft_confidence, logits=LOGITS) == message


def test_a_gpu_without_triton_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = {"logits": LOGITS, "temperature": None, "draft_ids": None, "statistics": []}
    out = {"draft_ids": torch.zeros(2, 3, dtype=torch.int64), "values": torch.zeros(0, 2, 3)}
    message = "draft_confidence needs Triton on a GPU: pip install 'dcut_kernels[triton]'"
    assert message_of(_confidence._triton, args=args, **out) == message


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("namespace", ["dcut", *(f"dcut_{name}" for name in NAMES)])
def test_opcheck(namespace: str, options: str) -> None:
    op = getattr(torch.ops, namespace).draft_confidence.default
    given: dict[str, Any] = {"statistics": ["log_prob"]}
    if options == "everything":
        ids = torch.tensor([[1, 2, 9], [0, 0, -1]])
        given = {"statistics": list(STATISTICS), "temperature": torch.full((3,), 0.7), "draft_ids": ids}
    results = torch.library.opcheck(op, (random(2, 3, 11),), given)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_once(backend: str) -> None:
    """From logits to the packed step in one graph, for every batch."""
    torch._dynamo.reset()
    budgets, costs = torch.tensor([8, 16], dtype=torch.int32), torch.tensor([1.0, 1.5])

    def step(logits: Tensor, bonus_ids: Tensor, seq_lens: Tensor) -> tuple[Tensor, ...]:
        drafts = dcut_kernels.draft_confidence(logits, statistics=("log_prob", "margin"))
        confidence, ids = drafts.values[0], drafts.draft_ids
        packed = dcut_kernels.select_and_pack(confidence, ids, bonus_ids, seq_lens, budgets, costs, log_confidence=True)
        return *drafts, *packed

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 7, 20):
        inputs = random(batch, 4, 50, seed=batch), torch.arange(batch), torch.arange(batch)
        for got, want in zip(compiled(*inputs), step(*inputs), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stop_here(name: str) -> None:
    got = backends.get(name).draft_confidence(random(2, 3, 11).requires_grad_())
    assert not got.values.requires_grad


@needs_triton
@pytest.mark.parametrize("target", ["cuda:75", "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_compiles_ahead_of_time(target: str) -> None:
    import triton
    from triton.compiler import ASTSource

    from dcut_kernels.triton import confidence
    from python_tests.triton_targets import TYPES, _cubin
    from python_tests.triton_targets import target as target_of

    ids = torch.zeros(2, 3, dtype=torch.int64)
    args = {"logits": random(2, 3, 64).bfloat16(), "temperature": torch.ones(3), "draft_ids": ids}
    launch = confidence.launch(args | {"statistics": STATISTICS}, ids, torch.zeros(4, 2, 3))
    constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
    types = {
        name: TYPES[value.dtype] if isinstance(value, Tensor) else "constexpr" if name.isupper() else "i32"
        for name, value in launch.arguments.items()
    }
    source = ASTSource(confidence.draft_confidence, types, constants)
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=target_of(target), options=options)
    if target.startswith("cuda"):
        registers, spills, _ = _cubin(compiled.asm["cubin"])
        assert registers is not None
        assert spills == 0
    else:
        assert compiled.asm["amdgcn"]
