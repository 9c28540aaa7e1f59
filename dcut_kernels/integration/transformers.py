"""Batched speculative decoding of any causal language model of transformers, packed and without padding.

`TransformersTarget` gives such a model the interface of `dcut_kernels.models.Target`, so that the engine of this
package runs it unchanged.  `TransformersEngine` takes drafts from any callable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..engine import Engine
from ..models import Attend, Config, Drafter, Target

NAME = "dcut_packed"
PROBE = 8  # tokens of each of the two rows that a new target has to read as its model does
HARMLESS = {  # what models hand to their attention function and this one need not know
    "dropout", "is_causal", "scaling", "position_ids", "position_embeddings", "cache_position",
    "use_cache", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip

# texts, n rows of tokens -> confidence [n, D] and draft tokens [n, D]
Draft = Callable[[list[list[int]]], tuple[Tensor, Tensor]]


@dataclass
class Call:
    """One run of the model: who attends to what, and how many layers have done so."""

    attend: Attend
    tokens: tuple[int, ...]  # shape of the token ids
    layers: int = 0


CALL: ContextVar[Call] = ContextVar("dcut_call")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' `AttentionInterface`: hands the tokens of all rows to the ``attend`` of the run.

    Takes rotated queries [1, heads, total, head_dim], keys and values [1, kv_heads, total, head_dim]; returns
    [1, total, heads, head_dim] and no weights.
    """
    call = CALL.get(None)
    if call is None:
        raise RuntimeError("attention: expected a run of TransformersTarget, got one of the model by itself")
    limits = {name: x for name, x in kwargs.items() if name not in HARMLESS} | {"attention_mask": attention_mask}
    for name, limit in limits.items():
        if limit is not None:
            shown = "a tensor" if isinstance(limit, Tensor) else limit
            raise ValueError(f"model: expected plain causal attention, got {name}={shown} in layer {call.layers}")
    if key.shape != value.shape:
        shapes = f"keys {tuple(key.shape)} and values {tuple(value.shape)}"
        raise ValueError(f"model: expected keys and values of one shape, got {shapes} in layer {call.layers}")
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    layer, call.layers = call.layers, call.layers + 1
    q, k, v = (x[0].transpose(0, 1).unflatten(0, call.tokens) for x in (query, key, value))
    mixed = call.attend(layer, q, k, v)
    return mixed.reshape(1, -1, *mixed.shape[-2:]), None


class TransformersTarget(Target):
    """A causal language model of transformers as the target of `dcut_kernels.engine.Engine`.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model in float32.  It belongs to the target from here on: its attention is replaced.
    feature_layers : sequence of int
        Layers after which the drafter reads hidden states, without the last one; none where it reads text.

    Raises
    ------
    ValueError
        If a layer does not attend causally to all earlier tokens, or if packing rows changes what the model says.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()) -> None:
        nn.Module.__init__(self)  # the layers are the model's own
        config = model.config.get_text_config()
        self.feature_layers, self.layer_count = tuple(feature_layers), config.num_hidden_layers
        if any(not 0 <= layer < self.layer_count - 1 for layer in self.feature_layers):
            # transformers returns what is behind the last layer only after the final norm
            raise ValueError(f"feature_layers: expected layers 0 to {self.layer_count - 2}, got {[*feature_layers]}")
        weight, device = next(model.parameters()), torch.get_default_device().type
        if (weight.dtype, weight.device.type) != (torch.float32, device):
            got = f"{weight.dtype} on {weight.device.type}"
            raise ValueError(f"model: expected torch.float32 on {device}, as the engine's cache, got {got}")
        if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
            raise ValueError(f"model: expected one that takes position_ids, got {type(model).__name__}")
        self.model = model.eval().requires_grad_(False)
        own = model.config._attn_implementation
        AttentionInterface.register(NAME, packed_attention)
        try:
            self.config = self._probe(config)
        except Exception:
            model.set_attn_implementation(own)
            raise
        self.embed_tokens = cast(nn.Embedding, model.get_input_embeddings())

    @torch.no_grad()
    def _probe(self, config: Any) -> Config:
        """Replace the attention, and see that the model reads two packed rows as it read them one by one."""
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            raise ValueError(f"model: expected logits without a soft cap, got final_logit_softcapping={cap}")
        rows = (torch.arange(2 * PROBE) * 7919 % config.vocab_size).view(2, PROBE)
        expected = self.model(rows, use_cache=False).logits
        self.model.set_attn_implementation(NAME)
        shapes: list[tuple[int, ...]] = []

        def attend(layer: int, *qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            shapes.append((q.shape[1], k.shape[1], q.shape[3]))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        hidden, _ = self(rows, torch.arange(PROBE), attend)
        error = float((self.logits(hidden) - expected).norm() / expected.norm())
        if not error < torch.finfo(torch.float32).eps ** 0.5:
            raise ValueError(
                f"model: expected its own logits from the head over packed rows, got others by {error:.1e}"
            )
        if len(set(shapes)) > 1:
            raise ValueError(f"model: expected layers of one shape, got (heads, KV heads, head_dim) of {shapes}")
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return Config(config.vocab_size, config.hidden_size, inner, self.layer_count, *shapes[0])

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Final hidden states [..., hidden] and features [..., layers * hidden]: one run, on the given tokens alone."""
        call = Call(attend, tuple(ids.shape))
        token = CALL.set(call)
        try:
            output = self.model.base_model(
                input_ids=ids.reshape(1, -1),
                position_ids=positions.expand(ids.shape).reshape(1, -1),
                use_cache=False,
                output_hidden_states=bool(self.feature_layers),
            )
        finally:
            CALL.reset(token)
        if call.layers != self.layer_count:
            expected = f"{self.layer_count} layers whose attention can be set"
            raise ValueError(f"model: expected {expected}, got {call.layers} in {type(self.model).__name__}")
        hidden = output.last_hidden_state.reshape(*ids.shape, -1)
        features = [output.hidden_states[layer + 1].reshape(hidden.shape) for layer in self.feature_layers]
        return hidden, torch.cat(features, -1) if features else hidden[..., :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of final hidden states."""
        return self.model.get_output_embeddings()(hidden)


class TextDrafter(Drafter):
    """Stands for a drafter where drafts come from a callable: no layers, nothing to cache."""

    def __init__(self, target: Config, draft_len: int) -> None:
        nn.Module.__init__(self)
        self.config, self.draft_len = replace(target, num_hidden_layers=0), draft_len


class TransformersEngine(Engine):
    """The engine with drafts of a callable: an assistant model, prompt lookup, or what you have.

    Parameters
    ----------
    model : PreTrainedModel
        As of `TransformersTarget`.
    draft : callable
        Takes the ``n`` texts so far; returns confidence, float32 [n, D], and draft tokens, int64 [n, D].
    draft_len : int
        ``D``.
    *args, **options
        As of `Engine`, from ``policy`` on.
    """

    def __init__(self, model: PreTrainedModel, draft: Draft, draft_len: int, *args: Any, **options: Any) -> None:
        target = TransformersTarget(model)
        super().__init__(target, TextDrafter(target.config, draft_len), *args, **options)
        self.draft = draft

    def _draft(self, bonus_ids: Tensor, seq_lens: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self.scheduler.running[row] for row in self.drafted.tolist()]
        return self.draft([[*request.prompt, *request.output] for request in rows])
