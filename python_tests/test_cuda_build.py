"""What nvcc makes of the CUDA kernels, without a GPU: resources, instruction counts, what the library needs.

``python -m python_tests.test_cuda_build --write`` puts the instruction counts of this nvcc into ``instructions.json``,
to be committed with the change of a kernel that caused them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from dcut_kernels import _load
from python_tests.child import ANSWER, PACKAGE, STEP, run

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CUBINS = ROOT / "build" / "cubins"  # one folder for each state of the sources and each nvcc
TABLE = Path(__file__).with_name("instructions.json")
BUILD = (ROOT / "CMakeLists.txt").read_text()
ARCHS = re.search(r'DCUT_CUDA_ARCHS "([\d;]+)"', BUILD)[1].split(";")
FLAGS = ["-std=c++17", *re.search(r"COMPILE_LANGUAGE:CUDA>:(.*)>", BUILD)[1].split(";")]
STORAGES = re.findall(
    r"k\w+", re.search(r"enum class Storage[^{]*{([^}]*)}", (CSRC / "include/dcut/plan.h").read_text())[1]
)
KERNELS = {f"select_and_pack<{storage}>" for storage in STORAGES}
KERNELS |= {"log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes"}
REGISTERS = 64  # a thread; 1024 of them are a block
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
needs_cuda = pytest.mark.skipif(_load.missing("cuda") is not None, reason=f"cuda: {_load.missing('cuda')}")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def output(*command: object) -> str:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@cache
def nvcc_version() -> str:
    return re.search(r"V(\d+\.\d+\.\d+)", output(NVCC, "--version"))[1]


@cache
def cuobjdump() -> Path:
    """Of the toolkit, or the one that comes with Triton."""
    spec = find_spec("triton")
    bundled = [Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"] if spec and spec.origin else []
    found = [Path(path) for path in [shutil.which("cuobjdump"), *bundled] if path and Path(path).exists()]
    if not found:
        pytest.skip("needs cuobjdump, of a CUDA toolkit or of Triton")
    return found[0]


@cache
def compiled(arch: str) -> tuple[Path, str]:
    """The kernels for one architecture, and what ptxas says of them."""
    sources = [CSRC / "cuda" / "launch.cu", *sorted((CSRC / "include" / "dcut").iterdir())]
    parts = [*FLAGS, nvcc_version(), *(path.name + path.read_text() for path in sources)]
    folder = CUBINS / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cubin, report = folder / f"sm_{arch}.cubin", folder / f"sm_{arch}.txt"
    if not report.exists():
        if f"compute_{arch}\n" not in output(NVCC, "--list-gpu-arch"):
            pytest.skip(f"nvcc {nvcc_version()} does not know sm_{arch}")
        folder.mkdir(parents=True, exist_ok=True)
        target = ["-I", CSRC / "include", f"-arch=sm_{arch}", "-cubin", sources[0], "-o", cubin]
        report.write_text(output(NVCC, *FLAGS, "-Xptxas=-v", *target))
    return cubin, report.read_text()


def kernel_name(symbol: str) -> str:
    """``select_and_pack<kHeld>`` of the mangled name, without the parameters."""
    name, storage = re.match(r"_ZN4dcut3gpu\d+([a-z_]+)(?:ILNS0_7StorageE(\d)E)?E", symbol).groups()
    return name if storage is None else f"{name}<{STORAGES[int(storage)]}>"


def instructions(arch: str) -> dict[str, int]:
    """Instructions of each kernel, without those that only fill its last cache line."""
    found: dict[str, int] = {}
    for line in output(cuobjdump(), "-sass", compiled(arch)[0]).splitlines():
        if symbol := re.match(r"\s*Function : (\S+)", line):
            name = kernel_name(symbol[1])
            found[name] = 0
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", line):
            found[name] += 1
    return dict(sorted(found.items()))


def table() -> dict[str, dict[str, dict[str, int]]]:
    """Instructions by version of nvcc, architecture and kernel."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@needs_nvcc
@each_arch
def test_resources(arch: str) -> None:
    """Every kernel fits a block of 1024 threads and keeps its values in registers."""
    blocks = compiled(arch)[1].split("Compiling entry function '")[1:]
    assert {kernel_name(block) for block in blocks} == KERNELS
    for block in blocks:
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", block
        ).groups()
        assert (stack, stores, loads) == ("0", "0", "0"), block
        assert int(re.search(r"Used (\d+) registers", block)[1]) <= REGISTERS, block
        assert " lmem" not in block


@needs_nvcc
@each_arch
def test_instruction_counts(arch: str) -> None:
    """A kernel grows or shrinks on purpose only."""
    expected = table().get(nvcc_version(), {}).get(arch)
    if expected is None:
        pytest.skip(f"{TABLE.name} has no sm_{arch} of nvcc {nvcc_version()}: python -m {__name__} --write")
    assert instructions(arch) == expected


@needs_cuda
def test_architectures() -> None:
    """The library holds what _build.json says: code for each, and PTX of the last for GPUs to come."""
    archs = _load.BUILD["cuda_archs"]
    listed = {kind: output(cuobjdump(), f"--list-{kind}", PACKAGE / "libdcut.so") for kind in ("elf", "ptx")}
    found = {
        kind: re.findall(rf"sm_(\d+)\.{suffix}", listed[kind]) for kind, suffix in (("elf", "cubin"), ("ptx", "ptx"))
    }
    assert sorted(set(found["elf"]), key=int) == archs
    assert found["ptx"] == archs[-1:]


@needs_cuda
def test_import_looks_for_no_driver(tmp_path: Path) -> None:
    """Importing and a step on the CPU neither load nor even look for the driver, and open no device."""
    here = "\nimport os\nassert not any('/dev/nvidia' in os.path.realpath(f'/proc/self/fd/{fd}') for fd in range(256))"
    log = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(tmp_path / "linker")}
    before = run("import torch", **log)
    searched_by_torch = read_away(tmp_path)
    done = run(f"{STEP}\nassert step() == {ANSWER}{here}", **log)
    assert (before.returncode, done.returncode) == (0, 0), done.stderr
    searched = read_away(tmp_path)
    assert any("libdcut.so" in line for line in searched)
    drivers = [line for line in searched - searched_by_torch if re.search(r"libcuda\.|libcudart|libnvidia", line)]
    assert drivers == []


def read_away(folder: Path) -> set[str]:
    """What the dynamic linker searched for and initialized."""
    lines = [line.partition(":")[2].strip() for path in folder.iterdir() for line in path.read_text().splitlines()]
    for path in folder.iterdir():
        path.unlink()
    return set(lines)


def configured(folder: Path, **variables: str) -> dict[str, object]:
    """What _build.json would say with other environment variables."""
    beside = Path(sys.executable).parent / "cmake"
    cmake = str(beside) if beside.exists() else shutil.which("cmake")
    if cmake is None or _load.missing("cpu"):
        pytest.skip("needs cmake and a C++ compiler")
    command = [cmake, "-S", str(ROOT), "-B", str(folder / "build"), f"-DDCUT_PYTHON={sys.executable}"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "build" / "_build.json").read_text())


def wrapper(folder: Path, text: str) -> str:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("nvcc", ["absent", "broken"])
def test_a_build_without_nvcc(nvcc: str, tmp_path: Path) -> None:
    path = wrapper(tmp_path, "exit 1") if nvcc == "broken" else str(tmp_path / "nvcc")
    build = configured(tmp_path, CUDACXX=path)
    assert (build["cuda"], build["cuda_archs"], build["nvcc"]) == (False, [], None)
    assert build["cuda_reason"] == f"CUDACXX, {path}, did not compile CMake's test program at build time"


@needs_nvcc
def test_a_build_with_an_older_nvcc(tmp_path: Path) -> None:
    """Architectures that nvcc does not know are left out."""
    known = (
        r"[ \"$1\" = --list-gpu-arch ] && printf 'compute_80\ncompute_90\ncompute_90a\n' || exec " + str(NVCC) + ' "$@"'
    )
    build = configured(tmp_path, CUDACXX=wrapper(tmp_path, known.replace('\\"', '"')))
    assert build["cuda"] is True
    assert build["cuda_archs"] == ["80", "90"]
    assert build["cuda_archs_unknown_to_nvcc"] == ["75", "100", "120"]
    assert (build["cuda_reason"], build["nvcc"]) == ("", nvcc_version())


def write() -> None:
    """Replace the counts of this nvcc."""
    counts = table() | {nvcc_version(): {arch: instructions(arch) for arch in ARCHS}}
    TABLE.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"] or NVCC is None:
        sys.exit("expected --write, and nvcc on PATH")
    write()
