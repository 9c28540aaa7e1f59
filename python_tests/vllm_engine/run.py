"""Decodes the shipped prompts in vLLM with methods of speculation and writes what happened as JSON.

    python -m python_tests.vllm_engine.run METHOD,... OUT

An engine is made for each, with the plugin switched on and the same costs on every machine; other ways to choose depths
take the plugin's place in turn.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from dcut_kernels import backends
from dcut_kernels.cost import additive
from python_tests.vllm_engine.models import COUNTERS, PAIR, TARGET, speculative_config

TOKENS, PROMPTS = 64, 64
CONCURRENCY = (1, 8, 32)
BUDGETS = [*range(1, 33), *range(40, 513, 16)]
SLOPES = {"dflash": 0.08}  # milliseconds of one more token


def load(method: str, folder: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine for at most 32 requests."""
    spec = speculative_config(method, folder)
    options = {
        "dtype": "float32", "max_model_len": 512, "enforce_eager": True, "disable_log_stats": False,
        "max_num_seqs": max(CONCURRENCY), "async_scheduling": False,
    } | options  # fmt: skip
    return LLM(model=str(TARGET), speculative_config=spec and spec | (speculation or {}), **options)


def runner(llm: LLM) -> Any:
    """The model runner of an engine of this process; the plugin's object is its ``dcut``."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def counters(llm: LLM) -> dict[str, int]:
    metrics = llm.get_metrics()
    return {key: sum(m.value for m in metrics if m.name == f"vllm:{name}") for key, name in COUNTERS.items()}


def prompts(llm: LLM, count: int) -> list[list[int]]:
    return llm.get_tokenizer()(json.loads((PAIR / "prompts.json").read_text())[:count])["input_ids"]


def decode(llm: LLM, concurrency: int, count: int = PROMPTS) -> dict[str, Any]:
    """Prompts, so many at a time: texts and what vLLM counted."""
    before, texts, given = counters(llm), [], prompts(llm, count)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    for first in range(0, count, concurrency):
        group = [{"prompt_token_ids": ids} for ids in given[first : first + concurrency]]
        texts += [list(output.outputs[0].token_ids) for output in llm.generate(group, greedy, use_tqdm=False)]
    return {"texts": texts} | {name: value - before[name] for name, value in counters(llm).items()}


class Logged:
    """Compares each decision of the plugin with the reference on the same confidences."""

    def __init__(self, planner: Any) -> None:
        self.planner, self.inner, self.wrong, self.steps = planner, planner.select, 0, 0
        self.reference = backends.get("reference").select_and_pack

    def __call__(self, confidence: torch.Tensor, *tokens: torch.Tensor, **options: Any) -> Any:
        found = self.inner(confidence, *tokens, **options)
        tables = self.planner.buckets.dense
        more = {"policy": self.planner.policy, "score": self.planner.score, "envelope": tables.envelope}
        if self.planner.calibration is not None:
            more["calibration"] = self.planner.calibration.table()
        if self.planner.floor_every:
            more["min_keep"] = self.planner._min_keep[: len(confidence)]
        expected = self.reference(confidence, *tokens, tables.budgets, tables.costs, **options, **more)
        self.steps += 1
        self.wrong += expected.keep_lens.tolist() != found.keep_lens.tolist()
        return found


def run(method: str, folder: Path) -> dict[str, Any]:
    """What every way to choose depths did at every concurrency."""
    steep = SLOPES.get(method, 0.4)
    costs = additive({1: 2.0, 32: 6.0}, {1: 6.0, 512: 6.0 + 511 * steep}, BUDGETS, batches=[1, 8, 32])
    costs.save(folder / "costs.json")
    options = {"costs": str(folder / "costs.json"), "floor_every": 16 if method == "eagle3" else 0}  # it is never sure
    llm = load(method, folder, additional_config={} if method == "ar" else {"dcut": options})
    if method == "ar":
        return {"ar": {str(n): decode(llm, n) for n in CONCURRENCY}}
    dcut = runner(llm).dcut
    dcut.planner.select = logged = Logged(dcut.planner)
    found = {"dcut": {str(n): decode(llm, n) for n in CONCURRENCY}}
    if method == "dflash":
        for depth in (1, 2):
            dcut.decide = lambda names, confidence, lengths, most=depth: ([min(most, n) for n in lengths], most)
            found[f"uniform-{depth}"] = {str(n): decode(llm, n) for n in CONCURRENCY[1:]}
    return found | {"logged": {"steps": logged.steps, "wrong": logged.wrong, "backend": backends.chosen()}}


def write(run: Callable[[str, Path], dict[str, Any]]) -> None:
    """Run what the command line names, and write what was found where it says."""
    with tempfile.TemporaryDirectory() as made:
        Path(sys.argv[2]).write_text(json.dumps({name: run(name, Path(made)) for name in sys.argv[1].split(",")}))


if __name__ == "__main__":
    write(run)
