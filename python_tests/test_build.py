"""What the sources promise without being built: layering, portability, and no hidden switches."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
HEADERS = CSRC / "include"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu"))
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# What the instruction-set files are compiled with; CMakeLists.txt has the same.
ISA_FLAGS = {
    "kernels_portable.cpp": [],
    "kernels_avx2.cpp": ["-mavx2", "-mbmi2"],
    "kernels_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mbmi2"],
}


def compile_only(compiler: str, *arguments: str | Path) -> None:
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_layering(path: Path) -> None:
    """Kernels and headers know no torch, only the shim that GPUs are emulated; nothing reads the environment."""
    text = path.read_text()
    includes = re.findall(r'#\s*include\s*[<"]([^>"]+)', text)
    foreign = r"(torch|ATen|c10)/|Python\.h" + ("" if path.is_relative_to(CSRC / "simt") else "|pybind11/")
    torch = [name for name in includes if re.match(foreign, name)]
    if path.is_relative_to(CSRC / "torch"):
        stable = r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/"
        assert [name for name in torch if not re.match(stable, name)] == []
    else:
        assert torch == []
    assert re.findall(r"\b(?:secure_)?getenv\b|\benviron\b", text) == []
    if path.name != "shim.cuh" and not path.is_relative_to(CSRC / "simt"):
        assert re.findall(r"\b(?:simt|emulat)\w*", text, re.IGNORECASE) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(HEADERS)], ids=lambda path: path.name)
def test_one_source_for_every_compiler(path: Path) -> None:
    """What differs between compilers is in the shim, in DCUT_HD and mul_high, and in what older GPUs lack."""
    conditions = re.findall(r"^\s*#\s*(?:el)?if(?:n?def)?\s+(.*)$", path.read_text(), re.MULTILINE)
    allowed = {
        "order.h": ["defined(__CUDACC__)", "defined(__CUDA_ARCH__)", "defined(__CUDA_ARCH__)"],
        "shim.cuh": ["defined(__CUDACC__)", "__CUDA_ARCH__ >= 900"],
        "warp.cuh": ["__CUDA_ARCH__ >= 800"],
    }
    assert conditions == allowed.get(path.name, [])


@needs_compiler
@pytest.mark.parametrize("header", ["dcut/order.h", "dcut/params.h", "dcut/launch.h", "dcut/plan.h"])
def test_headers_stand_alone(header: str, tmp_path: Path) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    compile_only(str(COMPILER), *STRICT, "-I", HEADERS, "-fsyntax-only", source)


@needs_nvcc
@pytest.mark.parametrize("header", ["launch_cuda.h", *sorted(path.name for path in HEADERS.glob("dcut/*.cuh"))])
def test_gpu_headers_stand_alone(header: str, tmp_path: Path) -> None:
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "dcut/{header}"\n#include "dcut/{header}"\n')
    target = tmp_path / "alone.cubin"
    strict = ("-std=c++17", "-arch=sm_90", "-Werror=all-warnings", "-cubin")
    compile_only(str(NVCC), *strict, "-I", HEADERS, source, "-o", target)


@needs_nvcc
def test_order_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Host and device code get the same functions from the same text."""
    kernel = tmp_path / "order.cu"
    kernel.write_text(
        '#include "dcut/order.h"\n'
        "__global__ void run(const int32_t* bits, int64_t* scores) {\n"
        "  const int32_t q = dcut::q_of_confidence(bits[threadIdx.x]);\n"
        "  scores[threadIdx.x] = dcut::score_of(dcut::key_of(q, dcut::w_of_weight(bits[0])));\n"
        "}\n"
    )
    target = tmp_path / "order.o"
    strict = ("-std=c++17", "-arch=sm_80", "-Werror=all-warnings")
    compile_only(str(NVCC), *strict, "-I", HEADERS, "-c", kernel, "-o", target)


def test_no_machine_dependent_build() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    assert not re.search(r"-march|-mtune|-Ofast|-ffast-math|-mcpu", text)
    options = re.findall(r'"(-m[^"]*)"', text)
    flags = [[flag for flag in option.split(";") if flag.startswith("-m")] for option in options]
    assert flags == [flags for flags in ISA_FLAGS.values() if flags]


@needs_compiler
@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
@pytest.mark.parametrize("name", ISA_FLAGS)
def test_instruction_sets_do_not_leak(name: str, tmp_path: Path) -> None:
    """An instruction-set file exports its table only: the linker may not pick its inline code for other machines."""
    flags, target = ISA_FLAGS[name], tmp_path / "kernels.o"
    probe = subprocess.run([str(COMPILER), *flags, "-E", "-x", "c++", "/dev/null"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"the compiler does not know {flags}")
    compile_only(str(COMPILER), "-std=c++17", "-O3", *flags, "-I", HEADERS, "-c", CSRC / "cpu" / name, "-o", target)
    lines = subprocess.run(["nm", "-C", "--defined-only", target], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(maxsplit=2)[1:] for line in lines.splitlines()]
    shared = [symbol for kind, symbol in symbols if kind not in "trdbn"]  # upper case: seen by the linker
    assert len(shared) == 1, shared
    assert re.fullmatch(r"dcut::cpu::k\w+", shared[0])
