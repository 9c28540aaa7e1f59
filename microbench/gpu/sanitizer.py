"""A few calls of the CUDA backend under compute-sanitizer."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from microbench.gpu.record import Record, run

TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = ("everything-at-once", "64x15", "large-everything")  # with three tools: nine runs
SECONDS = 90
FOUND = 9  # exit status where the tool found something
AGREE, DIFFER = "calls agree with the CPU", "the CPU and the GPU differ"
FINDING = re.compile(r"Invalid __|hazard|[Rr]ace reported|[Bb]arrier error")


def calls() -> int:
    """What runs under the tool: no kernel but ours, every tensor an allocation of its own."""
    from dcut_kernels import backends
    from microbench.cases import BENCH, LISTED
    from microbench.gpu.device import to_device, to_host
    from python_tests.compare import first_difference

    backend, oracle = backends.get("cuda"), backends.get(backends.chosen("cpu") or "reference")
    device = torch.device("cuda")
    for case in (case for case in (*LISTED, *BENCH) if case.name in CASES):
        result = backend.select_and_pack(**to_device(case.inputs, device))
        difference = first_difference(to_host(result), oracle.select_and_pack(**case.inputs))
        if difference is not None:
            print(f"{DIFFER} on {case}: {difference}")
            return 1
    print(f"{len(CASES)} {AGREE}")
    return 0


def sanitizer(record: Record, _: argparse.Namespace) -> bool:
    """Each tool over the same calls; a tool that refuses is a line, not a failure."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        record["skipped"] = "compute-sanitizer is not on PATH"
        print(record.read()["skipped"])
        return True
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        ended = dict(zip(TOOLS, pool.map(partial(run_tool, program), TOOLS), strict=True))
    for tool, text in ended.items():
        record[tool] = text
        print(f"{tool}: {text}")
    return not any(text.startswith("failed") for text in ended.values())


def run_tool(program: str, tool: str) -> str:
    """The calls under one tool."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []  # torch probes with calls that may fail
    command += [sys.executable, "-m", "microbench.gpu.sanitizer", "--calls"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return f"skipped: not done after {SECONDS} s"
    return verdict(done.returncode, done.stdout + done.stderr)


def verdict(status: int, text: str) -> str:
    """What a tool's run means: a tool that refuses the device breaks the calls as well, but finds nothing in them."""
    lines = [line for line in text.splitlines() if line.strip()]
    if AGREE in text and status == 0:
        return f"passed, {len(CASES)} calls"
    if AGREE in text or DIFFER in text or FINDING.search(text):
        return "failed: " + "\n".join(lines[:40])
    return "skipped, the tool gave up: " + (lines[-1] if lines else f"exit status {status}")


if __name__ == "__main__":
    sys.exit(calls() if "--calls" in sys.argv else run("sanitizer", sanitizer))
