"""Decodes requests of every kind at once in a small engine of vLLM.

    python -m python_tests.vllm_engine.requests ENGINE,... OUT

Prompts are read in chunks, next to requests that draft, and the KV cache is too small for all: some start again.
The engines are "ar", "off", which drafts without the plugin's switch, "dflash", and "sampled", which draws its drafts
and its text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from python_tests.vllm_engine.run import Logged, counters, load, prompts, runner, write

TOKENS = 48
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "ends inside a draft": {"max_tokens": 7},
    "stop string": {"stop": [" the", "is"], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [263, 310, 270], "min_tokens": 3},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "log-probabilities": {"logprobs": 2},
    "grammar": {"structured_outputs": {"regex": "[a-z]{3} [0-9]{2,4}( [a-z]+){3}"}},
    "bad words": {"bad_words": [" of", " the"]},
    "no end": {"ignore_eos": True, "min_tokens": 40},
}


def parameters(kind: str, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {"temperature": 0, "max_tokens": TOKENS} | KINDS[kind] | more
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def decode(llm: Any, **more: Any) -> dict[str, Any]:
    """Two requests of each kind: what came back, and what vLLM counted."""
    kinds = [*KINDS] * 2
    given = [{"prompt_token_ids": ids} for ids in prompts(llm, len(kinds))]
    outputs = llm.generate(given, [parameters(kind, **more) for kind in kinds], use_tqdm=False)
    found = []
    for kind, output in zip(kinds, outputs, strict=True):
        first = output.outputs[0]
        logs = [sorted(entry) for entry in output.prompt_logprobs or [] if entry] if "prompt" in kind else None
        found.append([kind, list(first.token_ids), first.finish_reason, str(first.stop_reason), first.text, logs])
    return {"outputs": found} | counters(llm)


def run(method: str, folder: Path) -> dict[str, Any]:
    config = {} if method in ("ar", "off") else {"dcut": True}
    speculation = {"draft_sample_method": "probabilistic"} if method == "sampled" else {}
    llm = load(
        "ar" if method == "ar" else "dflash", folder, speculation, additional_config=config, block_size=32,
        num_gpu_blocks_override=24, max_num_batched_tokens=160, enable_chunked_prefill=True,
        enable_prefix_caching=False, max_model_len=256,
    )  # fmt: skip
    if method in ("ar", "off"):
        changed = [name for name in ("take_draft_token_ids", "dcut") if name in vars(runner(llm))]
        names = [metric.name for metric in llm.get_metrics() if "dcut" in metric.name]
        return decode(llm) | {"changed": changed + names}
    planner = runner(llm).dcut.planner
    planner.select = logged = Logged(planner)
    found = decode(llm, temperature=1.0) if method == "sampled" else decode(llm)
    metrics = {key: getattr(planner.metrics, key) for key in ("drafts", "kept", "accepted")}
    rule = {"policy": planner.policy, "score": planner.score, "steps": logged.steps, "wrong": logged.wrong}
    return found | rule | {"metrics": metrics, "left": len(planner.metrics.requests)}


if __name__ == "__main__":
    write(run)
