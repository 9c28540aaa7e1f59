"""The emulation finds each kind of mistake that a CUDA kernel can make, and nothing in kernels that make none."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SIMT = ROOT / "csrc" / "simt"
PLANTED = Path(__file__).with_name("planted.cpp")
RUNTIME = sorted(path.stem for path in SIMT.glob("*.cpp") if path.stem not in ("kernels", "module"))
SCHEDULES = [("forward", 0), ("reverse", 0), ("shuffled", 1), ("shuffled", 2)]
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-g", f"-I{SIMT}"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
every_schedule = pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)


def compile_with(flags: list[str], *arguments: str | Path) -> None:
    done = subprocess.run(["g++", *STRICT, *flags, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The planted kernels as they are, with instrumented memory accesses, and on the portable fibers."""
    folder = tmp_path_factory.mktemp("simt")
    runtime = []
    for name in RUNTIME:
        runtime.append(folder / f"{name}.o")
        compile_with(["-O1"], "-c", SIMT / f"{name}.cpp", "-o", runtime[-1])
    programs = {}
    for variant, flags in (("plain", []), ("hooked", ["-fsanitize=thread"])):
        planted = folder / f"planted_{variant}.o"
        compile_with(["-O1", *flags], "-c", PLANTED, "-o", planted)
        programs[variant] = folder / variant
        compile_with([], planted, *runtime, "-o", programs[variant])
    fiber = folder / "fiber_ucontext.o"
    compile_with(["-O1", "-DDCUT_SIMT_UCONTEXT"], "-c", SIMT / "fiber.cpp", "-o", fiber)
    programs["ucontext"] = folder / "ucontext"
    others = [path for path in runtime if path.stem != "fiber"]
    compile_with([], folder / "planted_plain.o", fiber, *others, "-o", programs["ucontext"])
    return programs


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("simt") / "sanitized"
    sources = [SIMT / f"{name}.cpp" for name in RUNTIME]
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_with(flags, PLANTED, *sources, "-o", program)
    return program


def run(program: Path, case: str, schedule: str = "forward", seed: int = 0, fill: int = 0xCD) -> dict[str, Any]:
    command = [str(program), case, schedule, str(seed), str(fill)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second, "a launch depends on the one before it"
    return json.loads(first)


def line_of(text: str) -> str:
    """Return where the planted sources have ``text``, once, as reports say it."""
    sources = sorted(PLANTED.parent.glob("planted*"))
    lines = [(path.name, *line) for path in sources for line in enumerate(path.read_text().splitlines(), 1)]
    found = [f"{name}:{number}" for name, number, line in lines if text in line]
    assert len(found) == 1, (text, found)
    return found[0]


# Right kernels


@every_schedule
@pytest.mark.parametrize("variant", ["plain", "hooked", "ucontext"])
def test_a_right_kernel_passes(programs: dict[str, Path], variant: str, schedule: str, seed: int) -> None:
    result = run(programs[variant], "scan", schedule, seed)
    assert result["error"] == ""
    assert result["output"][:256] == list(accumulate(range(1, 257)))
    assert result["barriers"] == 2
    # Each warp scans in 5 shuffles; the first scans the sums of the others too, and synchronizes itself.
    collectives, longest = 8 * 5 + 5 + 1, 5 + 5 + 1
    # Stores to shared memory, then in the first warp a load and a store; loads in all but the first; stores of results.
    shared, other = 8 + 2 + 7, 8
    counted = (result["warp_ops"], result["longest_warp"], result["shared_requests"])
    if variant == "hooked":
        assert counted == (collectives + shared + other, longest + 1 + 2 + 1, shared)
    else:
        assert counted == (collectives, longest, 0)
    # Started, and released by each barrier and each warp operation.
    assert result["switches"] == 256 * (1 + 2) + 32 * collectives


RIGHT = {
    "blocks_apart": [100 * block + thread for block in range(3) for thread in range(32)],
    "warp_gather": [sum(range(32)), sum(range(32, 64))],
    "bytes_apart": list(range(64)),
    "histogram": [2 * 256 // 8] * 8,
    "halves": [0] * 16 + [lane ^ 1 for lane in range(16, 32)],
    "intrinsics": [1] * 32 * 17,
    "cluster_sum": [sums * thread for sums in [1 + 2 + 3 + 4] * 4 + [5 + 6 + 7 + 8] * 4 for thread in range(32)],
    "cluster_passes": [7] * 4 * 32,
}


@every_schedule
@pytest.mark.parametrize("variant", ["plain", "hooked"])
@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_reported_without_reason(
    programs: dict[str, Path], variant: str, case: str, schedule: str, seed: int
) -> None:
    result = run(programs[variant], case, schedule, seed)
    assert result["error"] == ""
    assert result["output"][: len(RIGHT[case])] == RIGHT[case]
    assert result["atomics"] == {"histogram": 256, "intrinsics": 3 * 32}.get(case, 0)


def test_counts_of_several_blocks(programs: dict[str, Path]) -> None:
    one, three = run(programs["plain"], "scan"), run(programs["plain"], "scan_in_three_blocks")
    times = {"barriers": 1, "longest_warp": 1, "warp_ops": 3, "switches": 3}
    assert all(three[name] == factor * one[name] for name, factor in times.items())
    for schedule in ("forward", "reverse"):  # block 1 alone has a barrier
        assert run(programs["plain"], "block_reads_other", schedule)["barriers"] == 1
    assert run(programs["plain"], "cluster_sum")["barriers"] == 3


def test_every_turn_of_a_loop_counts(programs: dict[str, Path]) -> None:
    result = run(programs["hooked"], "warp_gather")
    assert result["shared_requests"] == 2 * (1 + 32)
    assert result["warp_ops"] == 2 * (1 + 32 + 1 + 1)  # a __syncwarp, and the result


def test_schedules_differ(programs: dict[str, Path]) -> None:
    """Order decides this one: blocks in order, in reverse, and shuffled by seed."""
    last = [run(programs["plain"], "blocks_collide", schedule)["output"][0] for schedule in ("forward", "reverse")]
    assert last == [2, 0]
    shuffled = {run(programs["plain"], "blocks_collide", "shuffled", seed)["output"][0] for seed in range(20)}
    assert shuffled == {0, 1, 2}
    threads = [run(programs["plain"], "atomic_and_read", *schedule)["output"][:64] for schedule in SCHEDULES]
    assert threads[0] == list(range(1, 65))
    assert threads[1] == list(range(64, 0, -1))
    assert len({tuple(order) for order in threads}) == len(SCHEDULES)
    assert threads[2] == run(programs["plain"], "atomic_and_read", "shuffled", 1)["output"][:64]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("no_blocks", "blocks: expected 1 or more, got 0"),
        ("part_of_a_cluster", "blocks: expected whole clusters, got 3"),
        ("no_threads", "threads: expected 1 to 1024, got 0"),
        ("too_many_threads", "threads: expected 1 to 1024, got 1056"),
    ],
)
def test_bad_launches(programs: dict[str, Path], case: str, error: str) -> None:
    assert run(programs["plain"], case)["error"] == error


# Barriers and collectives


@every_schedule
def test_divergent_barrier(programs: dict[str, Path], schedule: str, seed: int) -> None:
    error = run(programs["plain"], "divergent_barrier", schedule, seed)["error"]
    assert error.startswith("divergent barrier: thread ")
    assert line_of("// here") in error
    assert line_of("// or here") in error


def test_barriers_of_different_kinds(programs: dict[str, Path]) -> None:
    error, place = run(programs["plain"], "barrier_kinds")["error"], line_of("__syncthreads_or(1) : ")
    places = f"thread 0 waits at __syncthreads_or at {place}, thread 32 waits at __syncthreads_and at {place}"
    assert error == f"divergent barrier: {places}"


@every_schedule
def test_early_exit(programs: dict[str, Path], schedule: str, seed: int) -> None:
    """Found whether the thread leaves before the others arrive or after."""
    error = run(programs["plain"], "early_exit", schedule, seed)["error"]
    assert re.match(r"thread 0 has exited, but thread \d+ waits at __syncthreads at planted.cpp:\d+$", error)


@every_schedule
def test_deadlock(programs: dict[str, Path], schedule: str, seed: int) -> None:
    result = run(programs["plain"], "missing_at_barrier", schedule, seed)
    barrier, warp = line_of("if (thread() == 0) __syncthreads();"), line_of("if (thread() < 32) __syncwarp();")
    assert result["error"] == (
        f"deadlock: thread 0 waits at __syncthreads at {barrier}, thread 1 waits at __syncwarp at {warp}"
    )


@every_schedule
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("foreign_mask", r"the mask does not name its own lane: thread \d+ waits at __shfl_sync\(0x1\) at "),
        (
            "mask_names_exited",
            r"(the mask names lane 0, which has exited: thread|thread 0 has exited, but the mask of) ",
        ),
        ("mask_names_nobody", r"the mask names lane 8, which does not exist: thread \d+ waits at __ballot_sync at "),
        ("bad_width", r"width: expected a power of two up to 32, got 12: thread \d+ waits at __shfl_sync at "),
        ("masks_differ", r"lanes of one mask in different collectives: .*__ballot_sync\(0x7fffffff\) at "),
        ("collectives_differ", r"lanes of one mask in different collectives: .*__shfl_(xor_)?sync at .*__shfl_"),
    ],
)
def test_bad_masks(programs: dict[str, Path], case: str, message: str, schedule: str, seed: int) -> None:
    error = run(programs["plain"], case, schedule, seed)["error"]
    assert re.match(message, error)
    assert re.search(r"planted.cpp:\d+$", error)


def test_both_ways_to_miss_an_exited_lane(programs: dict[str, Path]) -> None:
    errors = [run(programs["plain"], "mask_names_exited", schedule)["error"] for schedule in ("forward", "reverse")]
    assert errors[0].startswith("the mask names lane 0")
    assert errors[1].startswith("thread 0 has exited")


# Clusters


@every_schedule
def test_divergent_cluster_barriers(programs: dict[str, Path], schedule: str, seed: int) -> None:
    for case, places in {
        "cluster_or_block": (
            f"cluster_sync at {line_of('// of the cluster')}",
            f"__syncthreads at {line_of('// of the block')}",
        ),
        "cluster_divides": (f"cluster_sync at {line_of('// block 0')}", f"cluster_sync at {line_of('// the others')}"),
    }.items():
        error = run(programs["plain"], case, schedule, seed)["error"]
        assert error.startswith("divergent barrier: thread ")
        assert all(place in error for place in places)


@every_schedule
def test_exits_of_a_cluster(programs: dict[str, Path], schedule: str, seed: int) -> None:
    error = run(programs["plain"], "cluster_exit", schedule, seed)["error"]
    assert re.match(r"thread \d+ of block 3 has exited, but thread \d+ of block \d+ waits at cluster_sync at ", error)


@every_schedule
@pytest.mark.parametrize("case", ["cluster_not_started", "cluster_not_loaded"])
def test_memory_of_blocks_that_do_not_run(programs: dict[str, Path], case: str, schedule: str, seed: int) -> None:
    error, place = run(programs["hooked"], case, schedule, seed)["error"], line_of("// all blocks")
    pattern = r"thread \d+ of block \d: read of shared memory of a block that may not have started or has exited at "
    assert re.search(pattern + place, error)


def test_memory_of_blocks_that_exited_is_garbage(programs: dict[str, Path]) -> None:
    right, wrong = (run(programs["plain"], case)["output"][: 4 * 32] for case in ("cluster_sum", "cluster_not_loaded"))
    assert right[:32] == wrong[:32]
    assert right[32:] != wrong[32:]


def test_rank_outside_of_the_cluster(programs: dict[str, Path]) -> None:
    error, place = run(programs["plain"], "cluster_rank_too_high")["error"], line_of("dcut::simt::dyn_shared()), 2)")
    assert error == f"thread 0 of block 0: expected a place in its shared memory and a rank below 2 at {place}"


def signed_word(byte: int) -> int:
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


@pytest.mark.parametrize("fill", [0x00, 0xCD])
def test_undefined_values_are_garbage(programs: dict[str, Path], fill: int) -> None:
    """Shared memory before its first write, in every block, and what a shuffle reads from outside of its mask."""
    for variant in ("plain", "hooked"):
        result = run(programs[variant], "uninitialized", fill=fill)
        assert result["error"] == ""
        assert result["output"][:64] == [signed_word(fill)] * 64
    result = run(programs["plain"], "outside_of_mask", fill=fill)
    assert result["error"] == ""
    assert result["output"][:32] == [0, 1, 2, signed_word(fill), *range(4, 16), *[-1] * 16]


# Memory


@pytest.mark.parametrize(
    ("case", "damage"),
    [
        ("beyond_shared", "shared memory: expected 128 bytes, byte 128 was written"),
        ("before_shared", "shared memory: byte 1 before its start was written"),
    ],
)
def test_red_zones(programs: dict[str, Path], case: str, damage: str) -> None:
    assert run(programs["plain"], case)["error"] == f"block 0: {damage}"
    place = line_of({"beyond_shared": "shared()[blockDim.x] = 1", "before_shared": "shared()[-1] = 1"}[case])
    assert run(programs["hooked"], case)["error"] == f"thread 9: write outside of shared memory at {place}"


def test_stack_overflow(programs: dict[str, Path]) -> None:
    """It does not reach the stack of another thread."""
    done = subprocess.run([str(programs["plain"]), "stack_overflow", "forward", "0", "0"], capture_output=True)
    assert done.returncode == -signal.SIGSEGV


RACES = {
    # case: memory, the two places
    "scan_without_first_barrier": ("shared", "if (lane() == 31) sums[warp()] = v", "warp_scan(lane() < warps"),
    "scan_without_second_barrier": ("shared", "sums[lane()] = sum", "sums[warp() - 1]"),
    "lucky_race": ("shared", "x[40] = 40", "// thread 40 too"),
    "blocks_collide": ("global", "out[0] = static_cast<int>(blockIdx.x)", "out[0] = static_cast<int>(blockIdx.x)"),
    "block_reads_other": ("global", "if (b == 0) out[thread()] = 1", "out[n + thread()] = out[thread()]"),
    "block_rewrites": ("global", "// and of its own", "if (blockIdx.x == 1) out[0] = v + 1"),
    "cluster_not_stored": ("shared", "// own block", "// all blocks"),
    "cluster_passes_too_early": ("global", "// passed on", "if (cluster_rank() == 1) out[blockIdx"),
    "cluster_rewrites": ("global", "// both blocks", "if (cluster_rank() == 1) out[0] = v + 1"),
    "clusters_rewrite": ("global", "// both clusters", "blockIdx.x == 2) out[0] = v + 1"),
    "warp_gather_without_sync": ("shared", "// for lane 0", "sum += x[warp() * 32 + i]"),
    "half_synced": ("shared", "// for half", "x[warp() * 32 + 15] + x[warp() * 32 + 16]"),
    "shuffle_for_sync": ("shared", "// for a neighbor", "out[thread()] = x[left]"),
    "write_after_reads": ("shared", "out[thread()] = x[0];  // before the write", "- 1) x[0] = 5"),
    "bytes_and_words": ("shared", "// one byte", "shared()[thread() / 4]"),
    "words_and_bytes": (
        "shared",
        "if (thread() < 16) shared()[thread()] = 0",
        "// bytes",
    ),
    **{
        f"store_of_{size}": ("shared", "reinterpret_cast<const T*>(out)", "// the last word of the next")
        for size in (4, 8, 12, 16)
    },
    **{
        f"load_of_{size}": ("shared", "// of what the one before loads", "reinterpret_cast<T*>(out)")
        for size in (4, 8, 12, 16)
    },
    "atomic_then_read": ("shared", "atomicAdd(&x[0], 1)", "if (lane() == 5) out[thread()] = x[0]"),
    "lanes_read": ("shared", "out[thread()] = x[0];  // all lanes", "if (lane() == 5) x[0] += 1"),
    "atomic_and_read": ("shared", "atomicAdd(count, 1)", "static_cast<int>(count[0])"),
}


@every_schedule
@pytest.mark.parametrize("case", RACES)
def test_races(programs: dict[str, Path], case: str, schedule: str, seed: int) -> None:
    memory, *places = RACES[case]
    reports = run(programs["hooked"], case, schedule, seed)["error"].split("\n")
    pattern = rf"race on {memory} memory: .* at (planted\w*\.\w+:\d+), .* at (planted\w*\.\w+:\d+)$"
    found = [re.match(pattern, report) for report in reports]
    assert all(found), reports
    assert sorted(map(line_of, places)) in [sorted(match.groups()) for match in found if match]


@pytest.mark.parametrize(
    ("case", "schedule"),
    [("scan_without_first_barrier", "reverse"), ("scan_without_second_barrier", "forward"), ("lucky_race", "forward")],
)
def test_races_are_found_though_the_result_is_right(programs: dict[str, Path], case: str, schedule: str) -> None:
    right = list(range(64)) if case == "lucky_race" else list(accumulate(range(1, 257)))
    for variant, clean in (("plain", True), ("hooked", False)):
        result = run(programs[variant], case, schedule)
        assert result["output"][: len(right)] == right
        assert (result["error"] == "") == clean


# Sanitizers


@every_schedule
@pytest.mark.parametrize("case", ["scan", "intrinsics", "histogram", "cluster_sum", "early_exit", "divergent_barrier"])
def test_sanitizers_accept_the_emulation(
    sanitized: Path, programs: dict[str, Path], case: str, schedule: str, seed: int
) -> None:
    assert run(sanitized, case, schedule, seed) == run(programs["plain"], case, schedule, seed)


@pytest.mark.parametrize(
    ("case", "message", "place"),
    [
        ("beyond_global", "heap-buffer-overflow", "out[thread()] = out[thread() + 1]"),
        ("beyond_shared", "use-after-poison", "shared()[blockDim.x] = 1"),
        ("before_shared", "use-after-poison", "shared()[-1] = 1"),
        ("overflow", "signed integer overflow", "0x7fffffff + thread()"),
    ],
)
def test_sanitizers(sanitized: Path, case: str, message: str, place: str) -> None:
    done = subprocess.run([str(sanitized), case, "forward", "0", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr
    assert line_of(place) in done.stderr
