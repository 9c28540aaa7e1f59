"""Builds of the emulated kernels besides the one in the package, in ``build/simt``, each compiled once per content."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SIMT, HEADERS, CACHE = ROOT / "csrc" / "simt", ROOT / "csrc" / "include", ROOT / "build" / "simt"
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
# Without pointer-overflow: the address of a lane's first position, which only lanes with a draft there read, may lie
# before the table.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=pointer-overflow", "-fno-sanitize-recover=all"]
# Libraries that the process has to load before anything else, for the sanitizers.
PRELOADED = ("libasan.so", "libubsan.so")


class Build(NamedTuple):
    """How the emulated kernels are compiled."""

    arch: int = 900  # of the GPU whose branches are taken
    flags: tuple[str, ...] = ()  # of every file
    kernel_flags: tuple[str, ...] = ()  # of the kernels alone


BUILDS = {
    "plain": Build(flags=("-O2", "-g1")),
    "sm_75": Build(750, ("-O2", "-g1")),
    "hooked": Build(flags=("-O1", "-g"), kernel_flags=("-fsanitize=thread",)),  # reports races and accesses
    "sanitized": Build(flags=("-O1", "-g", *SANITIZERS)),
}


def _compile(command: list[str], suffix: str, content: str) -> Path:
    """Run a command that takes ``-o``, unless it has run on this content already."""
    target = CACHE / (hashlib.sha256(f"{command}{content}".encode()).hexdigest()[:20] + suffix)
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        os.replace(partial, target)
    return target


def compile_module(build: Build, headers: Path = HEADERS) -> Path:
    """Compile the module ``_simt``; ``headers`` stands in for ``csrc/include``."""
    import pybind11

    sources = sorted(SIMT.glob("*.cpp"))
    runtime = "".join(path.read_text() for path in sorted(SIMT.glob("*.h")))
    kernels = "".join(path.read_text() for path in sorted(headers.rglob("*.*h")))
    includes = [f"-I{headers}", f"-I{SIMT}", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    flags = [*FLAGS, f"-D__CUDA_ARCH__={build.arch}", *includes, *build.flags]
    objects = []
    for source in sources:
        content = source.read_text() + runtime + (kernels if source.stem in ("kernels", "module") else "")
        extra = build.kernel_flags if source.stem == "kernels" else ()
        objects.append(str(_compile(["g++", *flags, *extra, "-c", str(source)], ".o", content)))
    linked = [flag for flag in build.flags if flag.startswith("-fsanitize")]
    return _compile(["g++", "-shared", *linked, *objects], ".so", "")


def load(path: Path) -> ModuleType:
    """Import such a module, beside others: pybind11 tells modules apart by their full name."""
    loader = ExtensionFileLoader(f"{path.stem}._simt", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def sanitizer_environment() -> dict[str, str]:
    """Environment of a Python process that loads a build with sanitizers."""
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in PRELOADED
    ]
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "LD_PRELOAD": " ".join(found)}
    return os.environ | options | {"UBSAN_OPTIONS": "print_stacktrace=1"}
