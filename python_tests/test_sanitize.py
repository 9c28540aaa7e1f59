"""The CPU kernel reads and writes nothing outside its buffers and takes the same decisions on every architecture."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ["-std=c++17", "-ffp-contract=off", "-w", f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc/cpu"]
BASELINE = ["isa", "step", "select_and_pack", "kernels_portable"]
ISAS = {"portable": 0, "avx2": 1, "avx512": 2}
X86 = ["-mavx2", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]


def build(compiler: str, out: Path, sources: list[str], flags: list[str]) -> Path:
    files = [str(ROOT / f"csrc/cpu/{name}.cpp") for name in sources]
    subprocess.run(
        [compiler, *FLAGS, *flags, str(ROOT / "python_tests/sanitize.cpp"), *files, "-o", str(out)], check=True
    )
    return out


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ with its sanitizers")
    x86 = platform.machine() == "x86_64"
    sources = BASELINE + (["kernels_avx2", "kernels_avx512"] if x86 else [])
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *(X86 if x86 else [])]
    return build("g++", tmp_path_factory.mktemp("sanitize") / "steps", sources, flags)


@pytest.mark.parametrize("isa", ISAS)
def test_no_access_outside_the_buffers(sanitized: Path, isa: str) -> None:
    result = run(str(sanitized), str(ISAS[isa]))
    if result == "absent":
        pytest.skip(f"this machine has no {isa}")
    assert result == run(str(sanitized), "0")


def test_other_architecture_decides_alike(sanitized: Path, tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu qemu-user)")
    binary = build(compiler, tmp_path / "steps", BASELINE, ["-O3", "-static"])
    assert run(emulator, str(binary), "0", "100") == run(str(sanitized), "0", "100")
