"""Scripts that run in an interpreter of their own: what a process sees that has just imported the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dcut_kernels

PACKAGE = Path(dcut_kernels.__file__).parent

# A step of two requests: what every child process computes, and its answer.
STEP = """
import torch
import dcut_kernels

def step():
    confidence = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    ids = torch.arange(6, dtype=torch.int32).view(2, 3)
    bonus, budgets = torch.tensor([7, 8], dtype=torch.int32), torch.tensor([2, 6], dtype=torch.int32)
    batch = dcut_kernels.select_and_pack(confidence, ids, bonus, bonus, budgets, torch.tensor([2.0, 2.5]))
    return batch.token_ids.tolist()
"""
ANSWER = [7, 0, 1, 8, 3, 4, 0, 0]


def run(script: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, with the package at `path` or this one, and further environment variables."""
    searched = [str(path or PACKAGE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {name: value for name, value in os.environ.items() if name != "DCUT_BACKEND"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, searched))} | variables
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=path)


def answer_of(script: str, path: Path | None = None, **variables: str) -> Any:
    """What a script prints last, as JSON."""
    done = run(script, path, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def bare_copy(folder: Path) -> Path:
    """Put a copy of the package into a folder, without what was built."""
    ignore = shutil.ignore_patterns("*.so", "_build.json", "__pycache__", "demo")
    shutil.copytree(PACKAGE, folder / "dcut_kernels", ignore=ignore)
    return folder
