"""Build the library for the GPU of this machine alone, in place."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from microbench.gpu.record import Record, run

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu_check"  # not that of setup.py, whose cache knows all architectures
PACKAGE = ROOT / "dcut_kernels"
EXPLAIN = "import dcut_kernels; print(dcut_kernels.backends.explain())"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def build(record: Record, _: argparse.Namespace) -> bool:
    """Configure, compile, and replace the library of the package."""
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    tools = {name: shutil.which(name) for name in ("cmake", "nvcc")}
    if missing := [name for name, path in tools.items() if path is None]:
        record["skipped"] = f"{' and '.join(missing)} not on PATH: the library is left as it is"
        return True
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), f"-DDCUT_PYTHON={sys.executable}"]
    configure += [f"-DDCUT_CUDA_ARCHS={arch}", *(["-GNinja"] if shutil.which("ninja") else [])]
    start = time.perf_counter()
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel"]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(done.stdout)
            record["error"] = done.stdout[-4000:]
            return False
    record["build_seconds"] = round(time.perf_counter() - start, 1)
    for name in ("libdcut.so", "_build.json"):
        (PACKAGE / name).unlink(missing_ok=True)  # a running process may have the old file mapped
        shutil.copy2(BUILD / name, PACKAGE / name)
    record["explain"] = _output(sys.executable, "-c", EXPLAIN).splitlines()
    print("\n".join(record.read()["explain"]))
    print("dcut_kernels/libdcut.so now serves this GPU only; install again to build it for all")
    return True


if __name__ == "__main__":
    sys.exit(run("build", build))
