"""A Qwen3-layout target and a DFlash-layout drafter; attention is the caller's.

Every module works on any leading dimensions: training runs ``[batch, length]`` tokens, the engine ``[tokens]`` packed
ones.  What a token attends to is decided by the ``attend`` callback alone, so both share this one definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# layer, queries [..., heads, head_dim], keys and values [..., kv_heads, head_dim] -> [..., heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [..., 1, head_dim / 2]


@dataclass(frozen=True)
class Config:
    """Shape of one model, named as in a Hugging Face ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rotary(nn.Module):
    """Cosines and sines of rotary position embeddings, looked up by position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        cos, sin = self.get_buffer("table")[:, positions].unsqueeze(-2)
        return cos, sin


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the two halves of each head [..., heads, head_dim]."""
    (first, second), (cos, sin) = x.chunk(2, -1), rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Projections of grouped-query attention with normalized queries and keys."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = (-1, config.head_dim)
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, self.heads)), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, self.heads)), rotation)
        return keys, self.v_proj(x).unflatten(-1, self.heads)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer; ``index`` is what its ``attend`` is called with."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        h = self.input_layernorm(x)
        mixed = attend(self.index, self.self_attn.queries(h, rotation), *self.self_attn.keys_values(h, rotation))
        x = x + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Causal language model with tied embeddings; parameters are named as Qwen3's without the leading "model."."""

    def __init__(self, config: Config, feature_layers: Sequence[int]) -> None:
        super().__init__()
        self.config, self.feature_layers = config, tuple(feature_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Final hidden states [..., hidden], and the features that the drafter reads [..., layers * hidden]."""
        x, rotation, features = self.embed_tokens(ids), self.rotary(positions), []
        for layer in self.layers:
            x = layer(x, rotation, attend)
            if layer.index in self.feature_layers:
                features.append(x)
        return self.norm(x), torch.cat(features, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of final hidden states, the target's or the drafter's."""
        return F.linear(hidden, self.embed_tokens.weight)


class Drafter(nn.Module):
    """Block-parallel drafter: one forward over [bonus token, D masks] drafts D tokens.

    The block sees the target's features of all earlier positions, and itself in both directions.
    """

    def __init__(self, config: Config, feature_layers: Sequence[int], draft_len: int) -> None:
        super().__init__()
        self.config, self.draft_len = config, draft_len
        self.fc = nn.Linear(len(feature_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        layers = [Layer(config, i) for i in range(config.num_hidden_layers)]
        self.layers, self.attentions = nn.ModuleList(layers), [layer.self_attn for layer in layers]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.rotary = Rotary(config)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [..., kv_heads, head_dim] of verified positions, one pair per layer."""
        x, rotation = self.hidden_norm(self.fc(features)), self.rotary(positions)
        return [attention.keys_values(x, rotation) for attention in self.attentions]

    def forward(self, bonus: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of the drafts.

        Parameters
        ----------
        bonus : Tensor [..., hidden]
            The target's embeddings of the bonus tokens.
        positions : Tensor, int64 [...]
            Their positions; the drafts follow them.
        attend : Attend
            Called with ``[..., D + 1, heads, head_dim]``.

        Returns
        -------
        Tensor [..., D, hidden]
        """
        masks = self.mask_embedding.expand(*bonus.shape[:-1], self.draft_len, -1)
        x = torch.cat([bonus.unsqueeze(-2), masks], -2)
        rotation = self.rotary(positions.unsqueeze(-1) + torch.arange(self.draft_len + 1))
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return self.norm(x)[..., 1:, :]


def load_pair(folder: Path | str) -> tuple[Target, Drafter]:
    """Load ``folder/target`` and ``folder/drafter`` (safetensors in Hugging Face layout) for float32 inference."""
    from safetensors.torch import load_file

    folder = Path(folder)
    config = _read(folder / "drafter" / "config.json")
    layers = config["dflash_config"]["target_layer_ids"]
    drafter = Drafter(_config(config), layers, config["block_size"] - 1)
    mask = torch.load(folder / "drafter" / "mask_embedding.pt", weights_only=True)["embedding"]
    drafter.load_state_dict(load_file(folder / "drafter" / "model.safetensors") | {"mask_embedding": mask})
    return load_target(folder / "target", layers), drafter.float().eval().requires_grad_(False)


def load_target(folder: Path, feature_layers: Sequence[int]) -> Target:
    """Load a target alone, for a drafter that reads the hidden states after the given layers."""
    from safetensors.torch import load_file

    target = Target(_config(_read(folder / "config.json")), feature_layers)
    weights = load_file(folder / "model.safetensors")
    target.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    return target.float().eval().requires_grad_(False)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _config(values: dict[str, Any]) -> Config:
    return Config(**{name: values[name] for name in Config.__dataclass_fields__})
