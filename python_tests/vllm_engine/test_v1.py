"""The plugin in vLLM itself: the same texts, fewer verified tokens, and every way in which vLLM runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
from python_tests.vllm_engine.models import DRAFT_LEN, METHODS

CONCURRENCY = ("1", "8", "32")
SCRIPTS = (  # and how many ranks of theirs are switched on
    ("run", "dflash,ar", 1), ("run", "draft_model,eagle3", 2), ("run", "ngram", 1),
    ("requests", "ar,off,dflash,sampled", 2),
    ("ways", "server", 1), ("ways", "tensor_parallel", 2), ("ways", "processes", 1),
)  # fmt: skip


def script(module: str, case: str, ranks: int, folder: Path) -> dict[str, Any]:
    """What a module of these tests found, in a process of its own."""
    out = folder / f"{module}-{case}.json"
    command = [sys.executable, "-P", "-m", f"python_tests.vllm_engine.{module}", case, str(out)]
    own = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(module == "ways")), "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / f"cache-{module}-{case}"),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=1500)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    assert printed.count("dcut: trims drafts") == ranks
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the scripts found, two at a time, by module and engine."""
    folder = tmp_path_factory.mktemp("vllm")
    with ThreadPoolExecutor(2) as pool:
        futures = [(module, case, pool.submit(script, module, case, ranks, folder)) for module, case, ranks in SCRIPTS]
    return {f"{module}-{name}": each for module, _, found in futures for name, each in found.result().items()}


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_no_speculation(results: dict[str, Any], method: str) -> None:
    for name, by_concurrency in results[f"run-{method}"].items():
        for concurrency, found in by_concurrency.items() if name != "logged" else ():
            assert found["texts"] == results["run-ar"]["ar"][concurrency]["texts"], (name, concurrency)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_tokens_are_verified(results: dict[str, Any], method: str) -> None:
    for concurrency in CONCURRENCY:
        found = results[f"run-{method}"]["dcut"][concurrency]
        assert 0 < found["draft_tokens"] < found["kept"] + found["pruned"], concurrency


@pytest.mark.parametrize("method", METHODS)
def test_decisions_are_those_of_the_reference(results: dict[str, Any], method: str) -> None:
    logged = results[f"run-{method}"]["logged"]
    assert logged["steps"] > 500
    assert (logged["wrong"], logged["backend"]) == (0, "cpu")


@pytest.mark.parametrize("method", METHODS)
def test_metrics_are_exported(results: dict[str, Any], method: str) -> None:
    """Trimmed drafts are not among those that vLLM calls drafted and rejected; a request may end before its drafts."""
    for found in results[f"run-{method}"]["dcut"].values():
        assert found["draft_tokens"] <= found["kept"]
        assert found["steps"] > 0
        assert found["pruned"] > 0


@pytest.mark.parametrize("concurrency", CONCURRENCY[1:])
def test_more_is_accepted_than_at_uniform_depths(results: dict[str, Any], concurrency: str) -> None:
    """At an equal number of verified drafts; between depths, on the line."""
    ways = {name: by[concurrency] for name, by in results["run-dflash"].items() if name != "logged"}
    points = sorted((f["draft_tokens"], f["accepted_tokens"]) for n, f in ways.items() if n.startswith("uniform"))
    verified, accepted = ways["dcut"]["draft_tokens"], ways["dcut"]["accepted_tokens"]
    assert points[0][0] <= verified <= points[-1][0]
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if pair[1][0] >= verified)
    assert accepted > y0 + (y1 - y0) * (verified - x0) / (x1 - x0)


@pytest.mark.parametrize("kind", ["off", "dflash"])
def test_requests_of_every_kind(results: dict[str, Any], kind: str) -> None:
    """Texts, ends and log-probabilities of stop strings, penalties, grammars, ..., with prompts in chunks."""
    expected, found = results["requests-ar"], results[f"requests-{kind}"]
    for one, other in zip(expected["outputs"], found["outputs"], strict=True):
        assert one == other
    assert expected["preemptions"] > 0
    assert found["preemptions"] > 0


def test_counts_are_vllms(results: dict[str, Any]) -> None:
    """Preempted, ended and forbidden drafts are neither verified nor rejected."""
    found = results["requests-dflash"]
    assert found["metrics"]["accepted"] == found["accepted_tokens"]
    assert found["draft_tokens"] <= found["metrics"]["kept"]
    assert found["left"] < 8  # of those that ended last
    assert found["wrong"] == 0


def test_switched_off(results: dict[str, Any]) -> None:
    found = results["requests-off"]
    assert found["changed"] == []
    assert found["draft_tokens"] > results["requests-dflash"]["draft_tokens"]


def test_sampled_drafts(results: dict[str, Any]) -> None:
    """What keeps the distribution is chosen by itself (docs/lossless.md)."""
    found = results["requests-sampled"]
    assert (found["policy"], found["score"], found["wrong"]) == ("early_stop", "shifted", 0)
    assert found["steps"] > 10
    assert 0 < found["draft_tokens"] < found["metrics"]["drafts"]


@pytest.mark.parametrize("way", ["processes", "tensor_parallel", "server"])
def test_other_ways_to_run(results: dict[str, Any], way: str) -> None:
    """An engine in its own process, two ranks, and the server with a streaming client, through the entry point."""
    found = results[f"ways-{way}"]
    assert found["texts"] == results["run-ar"]["ar"]["8"]["texts"][: len(found["texts"])]
    assert 0 < found["draft_tokens"] < DRAFT_LEN * found["drafts"]
    assert found["draft_tokens"] <= found["kept"]
    assert found["steps"] > 0
