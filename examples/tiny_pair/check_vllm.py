"""Load a pair in vLLM, and compare texts and acceptance with those of the engine of this package.

    OMP_NUM_THREADS=2 python examples/tiny_pair/check_vllm.py

Needs vLLM with the ``dflash`` method, tried with 0.32.0 built for CPUs, beside this package.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcut_kernels.engine import Engine, Step, load_pair

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM, SamplingParams  # reads the variables above
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

TOKENS, DRAFT_LEN = 128, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent, metavar="DIR")
    parser.add_argument("--prompts", type=int, default=32, metavar="N")
    parser.add_argument("--patch", action="store_true", help="norm the keys of each draft layer with its own weights")
    args = parser.parse_args()
    if args.patch:
        patch_key_norms()
    texts = json.loads((args.pair / "prompts.json").read_text(encoding="utf-8"))[: args.prompts]
    llm = load(args.pair)
    prompts = llm.get_tokenizer()(texts)["input_ids"]
    ours, our_mat = run_engine(args.pair, prompts)
    theirs, their_mat = run_vllm(llm, prompts)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"{same} of {len(prompts)} texts identical; MAT: vLLM {their_mat:.2f}, engine {our_mat:.2f}")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            print(f"prompt {number}: tokens differ from number {first} on, {len(a)} and {len(b)} tokens")


def patch_key_norms() -> None:
    """On CPUs, vLLM 0.32.0 norms the context keys of every draft layer with the weights of the first."""

    def normalize(self: DFlashQwen3Model, keys: Tensor) -> Tensor:  # keys [layers, tokens, kv_heads, head_dim]
        pairs = zip(keys, self._k_norm_weights, strict=True)
        return torch.stack([F.rms_norm(x, weight.shape, weight, self._rms_norm_eps) for x, weight in pairs])

    DFlashQwen3Model._normalize_context_k = normalize


def load(pair: Path) -> LLM:
    speculative = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": DRAFT_LEN}
    return LLM(
        model=str(pair / "target"),
        speculative_config=speculative,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        disable_log_stats=False,  # for the acceptance
    )


def run_vllm(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Greedy texts and MAT."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    counters: dict[str, Any] = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    accepted, drafts = counters["vllm:spec_decode_num_accepted_tokens"], counters["vllm:spec_decode_num_drafts"]
    return [list(output.outputs[0].token_ids) for output in outputs], 1 + accepted / drafts


def run_engine(pair: Path, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Greedy texts and MAT."""
    steps: list[Step] = []
    texts = Engine(*load_pair(pair), "full").generate(prompts, TOKENS, on_step=steps.append)
    accepted = sum(sum(step.accepted) for step in steps)
    return texts, 1 + accepted / sum(int((step.drafts.draft_lens > 0).sum()) for step in steps)


if __name__ == "__main__":
    main()
