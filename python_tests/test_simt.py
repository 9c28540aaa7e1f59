"""The CUDA kernels, executed thread by thread, take the decisions of the CPU kernel under every schedule."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import pytest
import torch

from dcut_kernels import _load, backends
from dcut_kernels._check import Sizes
from dcut_kernels._params import Plan
from dcut_kernels._schema import MAX_BATCH_LAUNCH, MAX_DRAFT_LEN, MAX_DRAFTS_LAUNCH
from microbench.cases import BENCH, LISTED, Case, bench_case, make, random_case
from python_tests.compare import assert_same, composed, first_difference, poisoned, spilled
from python_tests.simt_build import BUILDS, ROOT, compile_module, load, sanitizer_environment

if _load.missing("simt") or _load.missing("cpu"):
    pytest.skip(str(_load.missing("simt") or _load.missing("cpu")), allow_module_level=True)
from dcut_kernels import _simt_ops

RANDOM = [random_case(seed, *size) for size in ((60, 20), (400, 9)) for seed in range(30)]
CASES = [*LISTED, *BENCH, *RANDOM]
SCHEDULES = [("forward", 0), ("reverse", 0), ("shuffled", 1), ("shuffled", 2), ("shuffled", 3)]
DEVICES = {  # where ranks stay when they do not fit into registers, and how many blocks share the work
    "cluster": {},
    "one block": {"cluster": 1},
    "64 KB": {"cluster": 1, "shared_limit": 64 << 10},
    "reread": {"cluster": 1, "shared_limit": 20_000},
}
KILOBYTE = 1 << 10
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def work(case: Case) -> int:
    return case.batch * (case.draft_len + 1)


def plan_of(batch: int, draft_len: int, buckets: int, cluster: int = 8, shared_limit: int = 227 * KILOBYTE) -> Plan:
    return _load.gpu_plan(0, Sizes(batch, batch, draft_len, buckets, 0), shared_limit, cluster)


def devices_of(case: Case) -> dict[str, dict[str, int]]:
    """One of each kind of launch that a case has."""
    plans = {name: plan_of(case.batch, case.draft_len, case.buckets, **DEVICES[name]) for name in DEVICES}
    kinds = {(plan.storage, plan.blocks): name for name, plan in reversed(plans.items())}
    return {name: DEVICES[name] for name in kinds.values()}


@cache
def module_of(build: str) -> ModuleType:
    return load(compile_module(BUILDS[build]))


@pytest.fixture
def simt() -> Iterator[ModuleType]:
    """The emulated kernels as they were built with the package."""
    yield _simt_ops._simt
    _simt_ops._simt.configure()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Puts another build of them in their place for one test."""

    def use(build: str) -> ModuleType:
        module = module_of(build)
        monkeypatch.setattr(_simt_ops, "_simt", module)
        return module

    return use


def check(simt: ModuleType, case: Case, schedule: str, seed: int, parts: bool = True) -> None:
    """Compare the fused kernel in new and in poisoned buffers, and the parts, with the CPU."""
    kernel, cpu = backends.get("simt"), backends.get("cpu")
    new, reused = cpu.select_and_pack(**case.inputs), cpu.select_and_pack(**case.inputs, out=poisoned(case))
    for name, device in devices_of(case).items():
        simt.configure(schedule=schedule, seed=seed, **device)
        out = poisoned(case)
        found = first_difference(kernel.select_and_pack(**case.inputs, out=out), reused) or spilled(out)
        plan = plan_of(case.batch, case.draft_len, case.buckets, **device)
        threads = plan.blocks * plan.threads
        assert simt.stats()["switches"] > threads >= 64, "the emulation did not run"
        found = found or first_difference(kernel.select_and_pack(**case.inputs), new)
        assert found is None, f"{name}, {schedule} {seed}: {found}"
    if parts:
        assert_same(composed(kernel, case.inputs), new)
        assert simt.stats()["barriers"] == 1  # of pack_prefixes, the last


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_cpu(simt: ModuleType, case: Case) -> None:
    """In new and in reused buffers, with ranks in every place, with and without clusters, under every schedule."""
    schedules = SCHEDULES if work(case) <= 3000 else [SCHEDULES[work(case) % len(SCHEDULES)]]
    for schedule in schedules:
        check(simt, case, *schedule)


@pytest.mark.parametrize("case", [case for case in CASES if work(case) <= 3000][::3], ids=str)
def test_agrees_with_the_reference(simt: ModuleType, case: Case) -> None:
    simt.configure(schedule="shuffled", seed=work(case))
    assert_same(
        backends.get("simt").select_and_pack(**case.inputs), backends.get("reference").select_and_pack(**case.inputs)
    )


# Other builds

PART = [case for case in CASES if work(case) <= 6000][1::4]


def test_part_has_every_launch() -> None:
    launches = {name for case in PART for name in devices_of(case)}
    assert launches == {"cluster", "one block", "reread"}
    assert {plan_of(case.batch, case.draft_len, case.buckets).blocks for case in PART} == {1, 4, 8}


@needs_compiler
@pytest.mark.parametrize("case", PART, ids=str)
def test_before_sm_80(built: Callable[[str], ModuleType], case: Case) -> None:
    """GPUs without sums over a warp in one instruction, and without clusters."""
    module = built("sm_75")
    module.configure(schedule="shuffled", seed=work(case), cluster=1)
    got = backends.get("simt").select_and_pack(**case.inputs)
    assert_same(got, backends.get("cpu").select_and_pack(**case.inputs))
    operations = module.stats()["warp_ops"]
    other = built("plain")
    other.configure(cluster=1)
    assert_same(backends.get("simt").select_and_pack(**case.inputs), got)
    assert operations > other.stats()["warp_ops"]  # shuffles instead


@needs_compiler
@pytest.mark.parametrize("case", PART, ids=str)
def test_no_races(built: Callable[[str], ModuleType], case: Case) -> None:
    """Of the kernel that reports its memory accesses; a race is an error."""
    module = built("hooked")
    assert module.instrumented
    check(module, case, *SCHEDULES[work(case) % len(SCHEDULES)])


def run_sanitized(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with the sanitizers and the build that has them, as ``simt``."""
    library = compile_module(BUILDS["sanitized"])
    before = (
        "import torch; torch.set_num_threads(1)\nfrom pathlib import Path\nfrom python_tests import test_simt as t\n"
        f"simt = t._simt_ops._simt = t.load(Path({str(library)!r}))\n"
    )
    command = [sys.executable, "-c", before + code]
    return subprocess.run(command, capture_output=True, text=True, env=sanitizer_environment(), cwd=ROOT)


@needs_compiler
def test_no_access_outside_of_buffers() -> None:
    """Nor any undefined behavior, in every kernel."""
    code = "for number, case in enumerate(t.PART):\n    t.check(simt, case, *t.SCHEDULES[number % 5])\nprint('clean')"
    done = run_sanitized(code)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]


@needs_compiler
def test_the_sanitizers_see_the_buffers() -> None:
    """A kernel that is told of one row too many is noticed."""
    done = run_sanitized(
        "from dataclasses import replace\nparams = t._simt_ops._params\n"
        "rows = params.rows\n"
        "params.rows = lambda args, sizes: rows(args, replace(sizes, batch=sizes.batch + 1))\n"
        "t.backends.get('simt').select_and_pack(**t.make('', torch.ones(9, 5)).inputs)\n"
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


# What a launch costs


def counted(simt: ModuleType, case: Case, **device: int) -> dict[str, int]:
    simt.configure(**device)
    backends.get("simt").select_and_pack(**case.inputs)
    return simt.stats()


@pytest.mark.parametrize("device", ["cluster", "one block"])
@pytest.mark.parametrize(("batch", "barriers"), [(64, 24), (256, 40)])
def test_barriers(simt: ModuleType, batch: int, barriers: int, device: str) -> None:
    assert counted(simt, bench_case(batch, 15), **DEVICES[device])["barriers"] <= barriers


@pytest.mark.parametrize("build", ["plain", pytest.param("hooked", marks=needs_compiler)])
def test_no_warp_does_the_work_of_others(built: Callable[[str], ModuleType], build: str) -> None:
    stats = counted(built(build), bench_case(64, 15))
    assert 4 * stats["longest_warp"] <= stats["warp_ops"]


def shapes(most: int, step: int = 1) -> Iterator[tuple[int, int]]:
    """Batches and draft lengths with so many drafts at most."""
    for draft_len in range(MAX_DRAFT_LEN + 1):
        top = min(MAX_BATCH_LAUNCH, most // max(draft_len, 1))
        yield from ((batch, draft_len) for batch in range(top, 0, -step))


def test_small_steps_stay_in_registers() -> None:
    assert {plan_of(*shape, 4).storage for shape in shapes(1024) if shape[1] > 0} == {0}


@pytest.mark.parametrize("cluster", [1, 8])
def test_shared_memory_that_needs_no_asking(cluster: int) -> None:
    assert max(plan_of(*shape, 4, cluster).shared_bytes for shape in shapes(8192)) <= 48 * KILOBYTE


@pytest.mark.parametrize(("cluster", "limit"), [(1, 64), (1, 99), (8, 99), (8, 227)])
@pytest.mark.parametrize("buckets", [0, 1, 4, 17, 256])
def test_one_launch_serves_every_shape(buckets: int, cluster: int, limit: int) -> None:
    for batch, draft_len in shapes(MAX_DRAFTS_LAUNCH, 17):
        plan = plan_of(batch, draft_len, buckets, cluster, limit * KILOBYTE)
        assert plan.shared_bytes <= limit * KILOBYTE
        assert plan.blocks in (1, 2, 4, 8)
        assert plan.blocks <= cluster
        assert buckets <= plan.threads <= 1024
        assert plan.threads % 32 == 0
        assert plan.blocks * (plan.threads >> plan.log_width) * plan.turns >= batch
        assert 2 << plan.log_width > draft_len


@pytest.mark.parametrize("shape", [(4096, 16), (1040, 63), (4096, 1), (1, 63), (4096, 0)], ids=str)
def test_extreme_shapes(simt: ModuleType, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    case = make("extreme", torch.rand(shape, generator=generator) ** 0.2)
    kernel, expected = backends.get("simt"), backends.get("cpu").select_and_pack(**case.inputs)
    for device in devices_of(case).values():
        simt.configure(schedule="shuffled", **device)
        assert_same(kernel.select_and_pack(**case.inputs), expected)
    assert_same(composed(kernel, case.inputs), expected)
