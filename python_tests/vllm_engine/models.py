"""Drafters for vLLM that fit the shipped target: its own, one of random weights, and the target itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PAIR = Path(__file__).resolve().parents[2] / "examples" / "tiny_pair"
TARGET, DRAFT_LEN = PAIR / "target", 15
METHODS = ("dflash", "ngram", "draft_model", "eagle3")
COUNTERS = {  # of vLLM's metrics
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "kept": "dcut_num_kept_draft_tokens",
    "pruned": "dcut_num_pruned_draft_tokens",
    "steps": "dcut_num_steps",
    "preemptions": "num_preemptions",
}


def speculative_config(method: str, folder: Path) -> dict[str, Any] | None:
    """Argument of vLLM; drafters that have to be made go to a folder.  "ar" is no speculation."""
    if method == "ar":
        return None
    if method == "dflash":
        return {"method": method, "model": str(PAIR / "drafter"), "num_speculative_tokens": DRAFT_LEN}
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if method == "draft_model":
        made = parallel_target(folder / "parallel")
        return {"method": method, "model": str(made), "num_speculative_tokens": 4, "parallel_drafting": True}
    return {"method": method, "model": str(random_eagle3(folder / "eagle3")), "num_speculative_tokens": 4}


def parallel_target(folder: Path) -> Path:
    """The target as its own drafter, of several tokens at once: the first is right, the others see masks."""
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 1}))
    return folder


def random_eagle3(folder: Path) -> Path:
    """An EAGLE-3 head of random weights."""
    target = json.loads((TARGET / "config.json").read_text())
    hidden, heads, kv_heads, dim = 192, 6, 2, 32
    kept = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    config = {name: target[name] for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": target["vocab_size"],
        "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) / shape[-1] ** 0.5

    layer = "midlayer."
    save_file(
        {
            "fc.weight": weight(hidden, 3 * hidden), "norm.weight": torch.ones(hidden),
            "lm_head.weight": weight(target["vocab_size"], hidden),
            f"{layer}hidden_norm.weight": torch.ones(hidden), f"{layer}input_layernorm.weight": torch.ones(hidden),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}self_attn.q_proj.weight": weight(heads * dim, 2 * hidden),
            f"{layer}self_attn.k_proj.weight": weight(kv_heads * dim, 2 * hidden),
            f"{layer}self_attn.v_proj.weight": weight(kv_heads * dim, 2 * hidden),
            f"{layer}self_attn.o_proj.weight": weight(hidden, heads * dim),
            f"{layer}mlp.gate_proj.weight": weight(256, hidden), f"{layer}mlp.up_proj.weight": weight(256, hidden),
            f"{layer}mlp.down_proj.weight": weight(hidden, 256),
        },
        folder / "model.safetensors",
    )  # fmt: skip
    return folder
