"""Where tensors lie in memory: reused and poisoned buffers, guard bands, offsets, strides, aliases, threads."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dcut_kernels import VerifyBatch, _load, backends
from dcut_kernels.ops import Backend
from microbench.cases import Case, make
from python_tests.compare import POISON, assert_same, composed, instruction_sets, pick, poisoned

ISAS = ("portable", "avx2", "avx512")
GUARD = 67  # elements on each side of a buffer: odd, so that the buffer is misaligned
PACKED = ("token_ids", "positions", "request_ids", "slot_mapping", "draft_index")


def available() -> list[str]:
    """The kernels that read and write memory in ways of their own, by instruction set or backend."""
    sets = instruction_sets() if _load.missing("cpu") is None else []
    return [*sets, *(["simt"] if _load.missing("simt") is None else [])]


@pytest.fixture(params=["reference", *ISAS, "simt"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The reference, the CPU kernel with every instruction set, and the CUDA kernel executed on the CPU."""
    if request.param not in ("reference", *available()):
        pytest.skip(f"there is no {request.param} here")
    if request.param not in ISAS:
        yield backends.get(request.param)
        return
    start = _load.cpu_isa()
    _load.cpu_isa(request.param)
    yield backends.get("cpu")
    _load.cpu_isa(start)


def confidence(rows: int, draft_len: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).beta(0.7, 0.7, (rows, draft_len)).astype(np.float32))


def plain(batch: int, draft_len: int) -> Case:
    return make(f"plain-{batch}x{draft_len}", confidence(batch, draft_len, 1), seed=batch)


def full(batch: int, draft_len: int, ids: torch.dtype = torch.int32) -> Case:
    """Every option at once: slots of a larger table, prompts, padding rows, paging, room to spare."""
    rng = np.random.default_rng(batch * 64 + draft_len)
    base = rng.integers(1, 5, batch)
    return make(
        f"full-{batch}x{draft_len}-{ids}", confidence(batch + 3, draft_len, 2), ids=ids, seed=batch,
        row_index=rng.permutation(batch + 3)[:batch], base_lens=base, num_reqs=[batch - batch // 4],
        draft_lens=rng.integers(0, draft_len + 1, batch), min_keep=rng.integers(0, 3, batch),
        max_keep=rng.integers(0, draft_len + 1, batch), weight=rng.uniform(0.5, 2, batch),
        block_table=rng.integers(-1, 500, (batch, 400)), block_size=16, score="shifted", pad_token=-5,
        capacity=int(base.sum()) + batch * draft_len + 9,
    )  # fmt: skip


def crowded(batch: int, draft_len: int) -> Case:
    """Mandatory drafts exceed the capacity, which ends inside a row."""
    return make(
        f"crowded-{batch}x{draft_len}", confidence(batch, draft_len, 3), min_keep=[draft_len] * batch,
        capacity=batch + draft_len // 2, seed=batch,
    )  # fmt: skip


def tight(batch: int, draft_len: int, tokens: int) -> Case:
    """A budget that fills the buffers to the last entry; the last row reads the first slot of a larger table."""
    return make(
        f"tight-{batch}x{draft_len}-{tokens}", confidence(batch + 3, draft_len, 6), budget=tokens, capacity=tokens,
        row_index=list(range(batch))[::-1], seed=batch,
    )  # fmt: skip


SHAPES = [(1, 1), (1, 7), (3, 5), (5, 15), (17, 7), (33, 31), (2, 63), (4, 0)]
CASES = [make_case(*shape) for shape in SHAPES for make_case in (plain, full)]
CASES += [crowded(3, 7), crowded(17, 15), full(0, 7), plain(0, 7), full(9, 15, torch.int64)]
CASES += [
    tight(batch, draft_len, batch + n) for batch, draft_len in [(3, 7), (5, 15), (17, 20)] for n in range(2, 20, 3)
]
CASES += [
    make("float16", confidence(9, 7, 4).half()),
    make("bfloat16", confidence(9, 7, 4).bfloat16(), score="shifted"),
    make("logarithms", confidence(9, 7, 4).log(), log_confidence=True),
    make("int64", confidence(9, 7, 4), ids=torch.int64, seq_lens=torch.arange(9), budget=40, capacity=40),
]


class Guarded:
    """Tensors inside larger ones, with poison on both sides."""

    def __init__(self) -> None:
        self.bands: list[tuple[str, Tensor, Tensor]] = []

    def wrap(self, name: str, t: Tensor, poison: float = POISON) -> Tensor:
        """A copy of `t` whose neighbors in memory are `poison`."""
        whole = torch.full((t.numel() + 2 * GUARD,), poison, dtype=t.dtype)
        view = whole[GUARD : GUARD + t.numel()].view(t.shape)
        view.copy_(t)
        self.bands.append((name, whole, whole.clone()))
        return view

    def assert_bands(self) -> None:
        for name, whole, before in self.bands:
            for side in (slice(None, GUARD), slice(-GUARD, None)):
                assert torch.equal(whole[side], before[side]), f"{name}: written outside its buffer"

    def assert_unchanged(self) -> None:
        for name, whole, before in self.bands:
            assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8)), f"{name} was modified"


def fenced(t: Tensor, front: bool) -> Tensor:
    """A copy of `t` in pages of its own, at their front or back; touching the pages around them kills the process."""
    if not t.numel():
        return t
    size = -(-t.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for fence in (0, mmap.PAGESIZE + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + fence), mmap.PAGESIZE, 0) == 0
    start = mmap.PAGESIZE + (0 if front else size - t.nbytes)
    return torch.frombuffer(pages, dtype=t.dtype, count=t.numel(), offset=start).view(t.shape).copy_(t)


def run_fenced(name: str) -> None:
    """Run every case between fences, in the process that this kills if a kernel reads or writes too far."""
    backend = backends.get("cpu" if name in ISAS else name)
    if name in ISAS:
        _load.cpu_isa(name)
    for case, front in itertools.product(CASES, (False, True)):
        print(case, "front" if front else "back", flush=True)
        expected = backend.select_and_pack(**case.inputs)
        inputs: dict[str, Any] = {
            key: fenced(t, front) if isinstance(t, Tensor) else t for key, t in case.inputs.items()
        }
        assert_same(backend.select_and_pack(**inputs), expected)
        assert_same(composed(backend, inputs), expected)
        out = VerifyBatch(*(fenced(t, front) for t in poisoned(case)))
        assert_gaps_kept(case, backend.select_and_pack(**inputs, out=out), expected)


def assert_gaps_kept(case: Case, out: VerifyBatch, fresh: VerifyBatch) -> None:
    """Earlier base tokens keep the poison in `out`, and hold the tail value in new buffers; the rest is equal."""
    gap = torch.zeros(case.capacity, dtype=torch.bool)
    base = case.inputs.get("base_lens")
    for i, start in enumerate(fresh.cu_seqlens[:-1].tolist()):
        active = fresh.cu_seqlens[i + 1] > start
        gap[start : start + (int(base[i]) - 1 if base is not None and active else 0)] = True
    tail = {"token_ids": case.inputs.get("pad_token", 0), "positions": 0}
    for name in PACKED:
        got, want = getattr(out, name), getattr(fresh, name)
        assert (got[gap] == POISON).all(), name
        assert (want[gap] == tail.get(name, -1)).all(), name
    rest = {name: torch.where(gap, getattr(fresh, name), getattr(out, name)) for name in PACKED}
    assert_same(out._replace(**rest), fresh)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_writes_everything_and_nothing_else(case: Case, backend: Backend, reference: Callable) -> None:
    guarded = Guarded()
    out = VerifyBatch(*(guarded.wrap(name, t) for name, t in poisoned(case)._asdict().items()))
    assert backend.select_and_pack(**case.inputs, out=out) is out
    guarded.assert_bands()
    assert_gaps_kept(case, out, reference(case)[0])


@pytest.mark.parametrize("name", [*ISAS, "simt"])
def test_nothing_outside_is_touched(name: str) -> None:
    if name not in available():
        pytest.skip(f"there is no {name} here")
    script = f"from python_tests.test_layouts import run_fenced; run_fenced({name!r})"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.returncode} in {done.stdout.splitlines()[-1:]}: {done.stderr}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_may_lie_anywhere(case: Case, backend: Backend, reference: Callable) -> None:
    """Inputs at odd offsets, between values that would change the answer, are read right and never written."""
    guarded = Guarded()
    inputs: dict[str, Any] = {}
    for name, value in case.inputs.items():
        poison = float("nan") if isinstance(value, Tensor) and value.is_floating_point() else 123456789
        inputs[name] = guarded.wrap(name, value, poison) if isinstance(value, Tensor) else value
    assert_same(backend.select_and_pack(**inputs), reference(case)[0])
    guarded.assert_unchanged()
    assert_same(composed(backend, inputs), reference(case)[0])
    guarded.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_halves_may_lie_anywhere(dtype: torch.dtype, offset: int, backend: Backend, reference: Callable) -> None:
    aligned = make(f"halves-{dtype}", confidence(9, 7, 4).to(dtype))
    whole = torch.full((9 * 7 + 8,), float("nan"), dtype=dtype)
    view = whole[offset : offset + 9 * 7].view(9, 7).copy_(aligned.inputs["confidence"])
    assert view.data_ptr() % 16 == 2 * offset
    assert_same(backend.select_and_pack(**aligned.inputs | {"confidence": view}), reference(aligned)[0])


def test_shrinking_batches_leave_nothing_stale(backend: Backend, reference: Callable) -> None:
    """One set of buffers, as a serving engine reuses it: every step equals one into new buffers."""
    steps = [make(f"step-{n}", confidence(17, 7, n % 99), num_reqs=[n]) for n in (17, 9, 12, 4, 1, 0, 3, 17, -2, 40)]
    out = poisoned(steps[0])
    for case in steps:
        backend.select_and_pack(**case.inputs, out=out)
        assert_same(out, reference(case)[0])


def test_growing_and_shrinking_calls(backend: Backend, reference: Callable) -> None:
    """Scratch memory of an earlier, larger or smaller call never shows."""
    for batch, draft_len in [(33, 31), (1, 1), (17, 7), (64, 15), (2, 63), (0, 7), (40, 3), (33, 31)]:
        for case in (plain(batch, draft_len), full(batch, draft_len)):
            assert_same(backend.select_and_pack(**case.inputs), reference(case)[0])


def test_results_are_independent(backend: Backend) -> None:
    """New buffers share no memory with each other, with the inputs, or with a later call."""
    first, second = plain(17, 7), plain(17, 7)
    kept = backend.select_and_pack(**first.inputs)
    copy = VerifyBatch(*(t.clone() for t in kept))
    second.inputs["confidence"].fill_(0.99)
    later = [backend.select_and_pack(**second.inputs) for _ in range(20)]
    assert_same(kept, copy)
    tensors = [*kept, *later[0], *later[1], *(t for t in second.inputs.values() if isinstance(t, Tensor))]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("name", ["confidence", "draft_ids", "bonus_ids", "seq_lens", "budgets", "costs"])
def test_size_one_dimensions_have_no_stride(name: str, backend: Backend, reference: Callable) -> None:
    """The stride of a dimension of size 1 means nothing."""
    case = make("single", [[0.5]], budgets=[[2]], costs=[[1.0]])
    value = case.inputs[name]
    odd = torch.cat([value.flatten()] * 99).as_strided(value.shape, [41] * value.dim())
    assert odd.stride() != value.stride()
    assert_same(backend.select_and_pack(**case.inputs | {name: odd}), reference(case)[0])


def transposed(t: Tensor) -> Tensor:
    return t.t()


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def strided(t: Tensor) -> Tensor:
    return torch.stack((t, t.clone().fill_(1)), -1)[..., 0]


def column(t: Tensor) -> Tensor:
    """A row-major table with an extra column."""
    return torch.cat((t, t[..., :1]), -1)[..., :-1]


@pytest.mark.parametrize("layout", [transposed, expanded, strided, column])
@pytest.mark.parametrize("name", ["confidence", "draft_ids", "block_table", "budgets", "costs"])
def test_strided_tables_are_refused(name: str, layout: Callable, backend: Backend) -> None:
    """Refused on every function that takes the table, whatever the strides; a contiguous copy is accepted."""
    table, size = [[4, 8, 12, 16], [4, 6, 12, 13], [5, 8, 9, 16], [4, 7, 8, 9]], 4
    case = make("square", confidence(size, size, 5), table, torch.tensor(table) * 0.5, block_table=table, block_size=4)
    view = layout(case.inputs[name])
    message = f"{name}: expected a contiguous tensor, got strides {list(view.stride())} for shape [4, 4]"
    prefix, keep_lens = backend.log_prefix_sum(case.inputs["confidence"]), torch.ones(4, dtype=torch.int32)
    arguments: dict[str, Any] = case.inputs | {"prefix": prefix, "keep_lens": keep_lens}
    for function in ("select_and_pack", "log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes"):
        call = getattr(backend, function)
        given = pick(call, arguments)
        if name not in given:
            continue
        with pytest.raises(RuntimeError) as failure:
            call(**given | {name: view})
        assert str(failure.value) == message
        call(**given | {name: view.contiguous()})


def test_threads(backend: Backend, reference: Callable) -> None:
    """Calls from several threads at once, into buffers of their own, do not meet."""
    cases = [plain(batch, 7) for batch in (1, 5, 17, 33)] + [full(batch, 7) for batch in (2, 9, 17, 40)]
    rounds = 2 if backend.name == "reference" else 60

    def work(case: Case) -> list[VerifyBatch]:
        return [backend.select_and_pack(**case.inputs) for _ in range(rounds)]

    with ThreadPoolExecutor(4) as pool:
        for case, results in zip(cases, pool.map(work, cases), strict=True):
            for result in results:
                assert_same(result, reference(case)[0])
