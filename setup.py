"""Drives CMake, which builds libdcut.so; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "cmake"
HEADERS = Path("include") / "dcut"  # below csrc, and below the package where it is not in a checkout


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command, None where there is no compiler."""
    if cxx := shlex.split(os.environ.get("CXX", "")):
        if not shutil.which(cxx[0]):
            sys.exit(f"CXX: expected a C++ compiler, got {cxx[0]!r}, which is not on PATH")
        return [str(shutil.which(cxx[0])), *cxx[1:]]
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def find_tool(name: str) -> str | None:
    """Return a build tool, those of the running environment first: pip does not put them on PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def can_emulate() -> bool:
    """Whether there is what the test module _simt.so needs: Linux, pybind11 and Python's own headers."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return sys.platform == "linux" and find_spec("pybind11") is not None and header.exists()


def build_library(compiler: list[str], simt: bool) -> None:
    """Build libdcut.so and its _build.json in BUILD, and _simt.so where it is wanted."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"torch: expected an importable torch to compile against, got {error!r}. Install torch first "
            "(pip install torch), then this package with pip install --no-build-isolation"
        )
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    if cmake is None:
        sys.exit("cmake: expected it on PATH, got nothing. Install it first (pip install cmake ninja)")
    options = [f"-DDCUT_PYTHON={sys.executable}", f"-DCMAKE_CXX_COMPILER={';'.join(compiler)}"]
    options.append(f"-DDCUT_SIMT={'ON' if simt else 'OFF'}")
    if ninja is not None:
        options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for arguments in (["-S", str(ROOT), "-B", str(BUILD), *options], ["--build", str(BUILD), "--parallel"]):
        if subprocess.run([cmake, *arguments]).returncode:
            sys.exit("libdcut.so was not built: the messages of CMake and the compiler are above")


class BuildLibrary(build_ext):
    """Puts libdcut.so and _build.json, which says how it was built or why it was not, into the package.

    A checkout also gets the test module _simt.so, any other package the headers that are compiled at run time.
    """

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = (ROOT if in_place else Path(self.build_lib)) / "dcut_kernels"
        package.mkdir(parents=True, exist_ok=True)
        simt = in_place and can_emulate()
        record = package / "_build.json"
        for name in ("libdcut.so", "_simt.so", record.name):
            (package / name).unlink(missing_ok=True)  # a running process may have the old file mapped: never overwrite
        if not in_place:
            shutil.copytree(ROOT / "csrc" / HEADERS, package / HEADERS, dirs_exist_ok=True)
        if (compiler := find_compiler()) is None:
            reason = "no C++ compiler was found at build time (c++, g++ and clang++ were tried, CXX is not set)"
            record.write_text(json.dumps({"library": None, "reason": reason}) + "\n")
            print(f"dcut_kernels is built without its library: {reason}")
            return
        build_library(compiler, simt)
        for name in ("libdcut.so", record.name, *(["_simt.so"] if simt else [])):
            shutil.copy2(BUILD / name, package / name)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "dcut_kernels"
        files = [package / "libdcut.so", package / "_build.json", *(package / HEADERS).glob("*")]
        return [str(path) for path in files if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """Tags the wheel for any Python on this platform: the library holds no Python symbols."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("dcut_kernels.libdcut", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
