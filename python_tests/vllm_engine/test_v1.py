"""The plugin in vLLM itself: the same texts, fewer verified tokens, and every way in which vLLM runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
from python_tests.vllm_engine.models import DRAFT_LEN, METHODS

ROOT = Path(__file__).resolve().parents[2]
CONCURRENCY = ("1", "8", "32")


def script(module: str, *arguments: object, **variables: str) -> str:
    """What a module of these tests prints, in a process of its own."""
    command = [sys.executable, "-m", f"python_tests.vllm_engine.{module}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `run` found, by method."""
    folder, found = tmp_path_factory.mktemp("vllm"), {}
    for method in ("ar", *METHODS):
        printed = script("run", method, folder / f"{method}.json", VLLM_CACHE_ROOT=str(folder / "cache"))
        assert ("dcut: trims drafts" in printed) == (method != "ar")
        found[method] = json.loads((folder / f"{method}.json").read_text())
    return found


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_no_speculation(results: dict[str, Any], method: str) -> None:
    for name, by_concurrency in results[method].items():
        for concurrency, found in by_concurrency.items() if name != "logged" else ():
            assert found["texts"] == results["ar"]["ar"][concurrency]["texts"], (name, concurrency)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_tokens_are_verified(results: dict[str, Any], method: str) -> None:
    for concurrency in CONCURRENCY:
        found = results[method]["dcut"][concurrency]
        assert 0 < found["draft_tokens"] < found["full"], concurrency


@pytest.mark.parametrize("method", METHODS)
def test_decisions_are_those_of_the_reference(results: dict[str, Any], method: str) -> None:
    assert results[method]["logged"]["steps"] > 500
    assert results[method]["logged"]["wrong"] == 0


@pytest.mark.parametrize("concurrency", CONCURRENCY[1:])
def test_more_is_accepted_than_at_uniform_depths(results: dict[str, Any], concurrency: str) -> None:
    """At an equal number of verified drafts; between depths, on the line."""
    dflash = {name: by[concurrency] for name, by in results["dflash"].items() if name != "logged" and concurrency in by}
    points = sorted((f["draft_tokens"], f["accepted_tokens"]) for n, f in dflash.items() if n.startswith("uniform"))
    verified, accepted = dflash["dcut"]["draft_tokens"], dflash["dcut"]["accepted_tokens"]
    assert points[0][0] <= verified <= points[-1][0]
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if pair[1][0] >= verified)
    assert accepted > y0 + (y1 - y0) * (verified - x0) / (x1 - x0)


@pytest.mark.parametrize("way", ["processes", "tensor_parallel", "server"])
def test_other_ways_to_run(results: dict[str, Any], way: str, tmp_path: Path) -> None:
    """An engine in its own process, two ranks, and the server with a streaming client, through the entry point."""
    script("ways", way, tmp_path / "out.json", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CACHE_ROOT=str(tmp_path))
    found = json.loads((tmp_path / "out.json").read_text())
    expected = results["ar"]["ar"]["8"]["texts"][: len(found["texts"])]
    assert found["texts"] == expected
    assert 0 < found["draft_tokens"] < DRAFT_LEN * found["drafts"]
