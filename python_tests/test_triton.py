"""The Triton backend: bit-identical in the interpreter, compiled for every target, one launch, no surprises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcut_kernels
from dcut_kernels import VerifyBatch, backends
from dcut_kernels._check import Sizes
from microbench.build import beta, h20_costs, int32, ratio_budgets
from microbench.cases import BENCH, LISTED, Case, bench_case, make, random_case
from python_tests.compare import assert_same, composed, pick, poisoned, spilled, tensor_difference
from python_tests.fuzz import garbage, next_differences

triton = pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from dcut_kernels.triton import decide, kernels, ops, order, pack, select  # noqa: E402
from python_tests import triton_targets  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MODULES = (order, select, decide, pack, kernels)
KERNELS = ("select_and_pack", "log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes")
DECIDING = ("select_and_pack", "bucket_argmax")
Answer = Callable[[Case], tuple[VerifyBatch, VerifyBatch]]


def wide_table() -> Case:
    """64x15 with 32 buckets: several chunks of them."""
    case = bench_case(64, 15)
    budgets = int32(ratio_budgets(64, 15, [(r + 1) / 32 for r in range(32)]))
    return make("64x15-32-buckets", case.inputs["confidence"], budgets, h20_costs(64, budgets))


SMALL = [case for case in LISTED if case.batch * (case.draft_len + 1) <= 600]
RANDOM = [random_case(seed, 20, 15) for seed in range(40)]
LARGE = [case for case in BENCH if str(case) in ("64x15", "256x15")]
LARGE += [case for case in LISTED if str(case) in ("shape-33x33", "shape-8x63", "large-everything")]
LARGE += [make("33x63", beta(np.random.default_rng(3), 33, 63)), wide_table()]
CASES = [*SMALL, *RANDOM, *LARGE]
EVERY = {"draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens", "num_reqs", "block_table", "score",
         "budget", "count_bonus", "log_confidence", "pad_token", "capacity", "calibration", "policy", "envelope",
         "next_budget", "host_budget"}  # fmt: skip


# One column of equal keys of which 13 in 24 are kept: the count of earlier ties has to survive from tile to tile.
TIED = make("ties-across-tiles", torch.full((24, 7), 0.5), [24 + 13, 24 + 24 + 5], [1, 9])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that few rows take several of them, and several programs."""
    for name, positions in {"TILE": 64, "PACK_TILE": 32}.items():
        monkeypatch.setattr(ops, name, positions)


def check(case: Case, answer: Answer) -> None:
    backend = backends.get("triton")
    new, written = answer(case)
    assert_same(backend.select_and_pack(**case.inputs), new)
    out = poisoned(case)
    backend.select_and_pack(**case.inputs, out=out)
    assert_same(out, written)
    assert spilled(out) is None
    assert list(next_differences(case, backend, backends.get("reference"))) == []


def test_enough_cases_and_every_option() -> None:
    assert len(CASES) >= 200
    assert {name for case in CASES for name in case.inputs} >= EVERY
    inputs = [case.inputs for case in CASES]
    assert {i["confidence"].dtype for i in inputs} == {torch.float32, torch.float16, torch.bfloat16}
    assert {(i["draft_ids"].dtype, i["seq_lens"].dtype) for i in inputs} >= {
        (a, b) for a in (torch.int32, torch.int64) for b in (torch.int32, torch.int64)
    }
    assert {(i["budgets"].dim(), i["costs"].dim()) for i in inputs} == {(1, 1), (1, 2), (2, 1), (2, 2)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(reference: Answer, case: Case) -> None:
    check(case, reference)


@pytest.mark.parametrize("case", [TIED, *SMALL[::16], *RANDOM[::8]], ids=str)
def test_equals_reference_in_many_tiles(small_tiles: None, reference: Answer, case: Case) -> None:
    check(case, reference)


@pytest.mark.parametrize("batch", [5, 40])
def test_the_next_budget_may_take_the_place_of_this_one(small_tiles: None, batch: int) -> None:
    """One program then packs all: another could still have to read what the first one has overwritten."""
    inputs = bench_case(batch, 7).inputs | {"policy": "history", "score": "shifted"}
    here, there = (torch.tensor([2 * batch, 7], dtype=torch.int32) for _ in range(2))
    for _ in range(3):
        got = backends.get("triton").select_and_pack(**inputs, budget=here[:1], next_budget=here)
        expected = backends.get("reference").select_and_pack(**inputs, budget=there[:1], next_budget=there)
        assert_same(got, expected)
        assert torch.equal(here, there)
    args = triton_targets.arguments("select_and_pack", inputs | {"budget": here[:1], "next_budget": here})
    sizes = Sizes(batch, batch, 7, 4, 8 * batch)
    out = {name: torch.empty(0) for name in VerifyBatch._fields}
    assert ops.fused(args, sizes, out, True).programs == 1


def test_small_tiles_are_small(small_tiles: None) -> None:
    tiles = ops.Tiles.of(40, 7)
    assert (tiles.one, tiles.rows, tiles.pack) == (False, 8, 4)
    assert tiles.share(40, torch.device("cpu")) == (2, 20)
    assert tiles.share(40, torch.device("cuda")) == (10, 4)


@pytest.mark.parametrize("case", [*SMALL[::5], *RANDOM[::4]], ids=str)
def test_parts_equal_reference(reference: Answer, case: Case) -> None:
    triton_backend, oracle = backends.get("triton"), backends.get("reference")
    assert_same(composed(triton_backend, case.inputs), reference(case)[0])
    prefix = oracle.log_prefix_sum(**pick(oracle.log_prefix_sum, case.inputs))
    given = garbage(prefix, case.batch)
    options = pick(oracle.segmented_topk, case.inputs)
    got, expected = triton_backend.segmented_topk(given, **options), oracle.segmented_topk(given, **options)
    assert tensor_difference("depths", got, expected) is None
    options = pick(oracle.bucket_argmax, case.inputs)
    pairs = zip(triton_backend.bucket_argmax(given, **options), oracle.bucket_argmax(given, **options), strict=True)
    for name, (a, b) in zip(("decision", "gains"), pairs, strict=True):
        assert tensor_difference(name, a, b) is None


@pytest.mark.parametrize("case", [TIED, *SMALL[3::60]], ids=str)
def test_parts_equal_reference_in_many_tiles(small_tiles: None, reference: Answer, case: Case) -> None:
    assert_same(composed(backends.get("triton"), case.inputs), reference(case)[0])


def test_depths_of_ties_across_tiles(small_tiles: None) -> None:
    depths = backends.get("triton").segmented_topk(torch.full((24, 7), 1 << 20, dtype=torch.int32), int32([24 + 13]))
    assert depths.tolist() == [[1] * 13 + [0] * 11]


def test_given_prefixes_do_not_overflow_under_a_weight() -> None:
    """A prefix at the limit of int32 counts as a score of 0, also where the weight makes its key larger still."""
    inputs = {
        "prefix": int32([[2**31 - 1] * 3, [1 << 20] * 3]),
        "budgets": int32([3, 5]),
        "weight": torch.full((2,), 0.1),
    }
    depths = backends.get("triton").segmented_topk(**inputs)
    assert torch.equal(depths, backends.get("reference").segmented_topk(**inputs))
    assert depths.tolist() == [[0, 1], [0, 3]]


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, dcut_kernels; print('triton' in sys.modules)"
    root = Path(dcut_kernels.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


def test_missing_triton_names_the_remedy() -> None:
    code = "import sys; sys.modules['triton'] = None\ntry: import dcut_kernels.triton.ops\n"
    code += "except ImportError as e: print(e)"
    root = Path(dcut_kernels.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "triton: expected version 3.6 or newer, got none; pip install 'dcut_kernels[triton]'"


def test_interpreting_leaves_other_users_of_triton_alone() -> None:
    language = triton.language
    before = {name: getattr(language, name) for name in dir(language)}
    members = {name: getattr(language.tensor, name) for name in dir(language.tensor)}
    case = RANDOM[3]
    backends.get("triton").select_and_pack(**case.inputs)
    assert all(getattr(language, name) is value for name, value in before.items())
    assert all(getattr(language.tensor, name) == value for name, value in members.items())
    assert not triton.knobs.runtime.interpret
    assert all(isinstance(getattr(kernels, name), JITFunction) for name in KERNELS)


def test_one_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *args, **keywords)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    backend = backends.get("triton")
    for case in (bench_case(8, 7), bench_case(1024, 7), next(c for c in LISTED if c.name == "everything-at-once")):
        backend.select_and_pack(**case.inputs)
        assert launched == ["select_and_pack"]
        launched.clear()
        backend.select_and_pack(**case.inputs, out=poisoned(case))
        assert launched == ["select_and_pack"]
        launched.clear()
    composed(backend, bench_case(8, 7).inputs)
    assert launched == ["log_prefix_sum", "bucket_argmax", "segmented_topk", "pack_prefixes"]


def test_nothing_sorts() -> None:
    for module in MODULES:
        assert not re.search(r"\b(sort|topk|argsort)\(", Path(module.__file__).read_text()), module


def compiled_as(launch: ops.Launch) -> str:
    """What decides which binary serves a launch: types, what is compiled in, options."""
    kernel = getattr(kernels, launch.kernel)
    backend = triton.compiler.compiler.make_backend(triton_targets.target("cuda:90"))
    bind = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, options = bind(**launch.arguments, num_warps=launch.warps, enable_fp_fusion=False)
    return f"{launch.kernel} {specialization} {options}"


@pytest.mark.parametrize(
    ("batches", "draft_lens", "buckets"),
    [(range(33, 65), (8, 15), (3, 4, 5, 31, 256)), ((129, 200, 256), (15,), (4,)), ((257, 1024, 4096), (15,), (4,))],
    ids=["small", "one-tile", "many-tiles"],
)
def test_one_binary_serves_a_class_of_sizes(batches: Any, draft_lens: Any, buckets: Any) -> None:
    found = {compiled_as(triton_targets.fused(b, d, r)) for b in batches for d in draft_lens for r in buckets}
    assert len(found) == 1
    assert compiled_as(triton_targets.fused(batches[0], 7, 4)) not in found
    shifted = triton_targets.fused(batches[0], draft_lens[0], buckets[0], pad_token=2**40)
    assert compiled_as(shifted) in found


def test_one_binary_whatever_the_alignment() -> None:
    aligned = triton_targets.fused(64, 15, 4)
    ids = torch.empty(64 * 15 + 1, dtype=torch.int32)[1:].view(64, 15)
    assert compiled_as(triton_targets.fused(64, 15, 4, draft_ids=ids)) == compiled_as(aligned)


STOPPING = ("64x15 R=4, all options", "bucket_argmax")  # compiled with early stop
COMPILED = ("64x15 R=4", "64x15 R=4, all options", "256x15 R=4", "1024x15 R=4", *KERNELS[1:])


@pytest.mark.parametrize("target", triton_targets.TARGETS)
def test_compiles_ahead_of_time(target: str) -> None:
    """Without spills; the argmax has one division as the only floating-point arithmetic, early stop has none."""
    launches = triton_targets.launches()
    for label in COMPILED:
        report = triton_targets.compile_for(launches[label], triton_targets.target(target))
        assert report.instructions > 100, label
        assert report.registers is not None, label
        assert report.spills == 0, label
        if target.startswith("cuda"):
            arithmetic = re.findall(r"\b((?:add|sub|mul|fma|mad|div|rcp|ex2|lg2)\.[a-z.]*f(?:16|32|64))\b", report.text)
            argmax = launches[label].kernel in DECIDING and label not in STOPPING
            assert set(arithmetic) == ({"div.rn.f64"} if argmax else set()), label
            assert ".ftz" not in report.text, label


OLDEST = "3.6.0"


@pytest.fixture(scope="module")
def oldest() -> dict[str, str]:
    """An environment in which the oldest Triton that is supported comes first; it is installed once, under build/."""
    folder = ROOT / "build" / f"triton-{OLDEST}"
    if not (folder / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, f"triton=={OLDEST}"]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"triton {OLDEST} cannot be installed here")
    return os.environ | {"PYTHONPATH": str(folder)}


def run_with(environment: dict[str, str], *module: str) -> str:
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_oldest_triton_compiles(oldest: dict[str, str]) -> None:
    table = run_with(oldest, "python_tests.triton_targets", "--only", "64x15 R=4")
    assert table.startswith(f"triton {OLDEST}\n")
    assert [table.count(f"\n{target}") for target in triton_targets.TARGETS] == [2] * 7


def test_oldest_triton_agrees(oldest: dict[str, str]) -> None:
    sample = "everything-at-once or all-equal-half or bfloat16-ties"
    assert " passed" in run_with(oldest, "pytest", "-q", "python_tests/test_triton.py", "-k", sample)
