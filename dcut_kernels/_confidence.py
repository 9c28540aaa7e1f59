"""`draft_confidence` outside the compiled library: its reference, and which backend has which kernel."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _bind

FLOAT32_MAX = torch.finfo(torch.float32).max
TEMPERATURES = (2.0**-100, 2.0**100)  # within which everything else is finite

Args = dict[str, Any]


def reference(args: Args, draft_ids: Tensor, values: Tensor) -> None:
    """Fill `draft_ids` and `values` from a softmax in float64."""
    logits, temperature, given = (args[name] for name in ("logits", "temperature", "draft_ids"))
    x = logits.detach().double().nan_to_num(nan=-torch.inf, posinf=FLOAT32_MAX, neginf=-torch.inf)
    draft_ids.copy_(x.argmax(-1) if given is None else given)
    if temperature is not None:
        harmless = torch.where(temperature > 0, temperature.double(), 1.0).clamp(*TEMPERATURES)
        x = x / harmless[:, None]
    empty = (x == -torch.inf).all(-1, keepdim=True)
    log_q = torch.where(empty, -torch.inf, x.log_softmax(-1))
    q = log_q.exp()
    exists = (draft_ids >= 0) & (draft_ids < x.shape[-1])
    of_token = log_q.gather(-1, draft_ids.where(exists, 0)[..., None])[..., 0]
    top = q.topk(min(2, x.shape[-1])).values
    statistics = {
        "log_prob": of_token.where(exists, -torch.inf),
        "max_prob": top[..., 0],
        "collision": q.square().sum(-1),
        "margin": top[..., 0] - top[..., 1:].sum(-1),
    }
    for value, name in zip(values, args["statistics"], strict=True):
        value.copy_(statistics[name])


def _triton(args: Args, draft_ids: Tensor, values: Tensor) -> None:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("draft_confidence needs Triton on a GPU: pip install 'dcut_kernels[triton]'")
    importlib.import_module(".triton.confidence", __package__).run(args, draft_ids, values)


def _none(name: str, *_: object) -> None:
    raise RuntimeError(f"backend '{name}' has no draft_confidence: it executes CUDA source, and this operator has none")


def register(library: torch.library.Library, key: str, name: str) -> None:
    """Implement the operator in one namespace for one dispatch key with what backend `name` has."""
    kernels: dict[str, _bind.ConfidenceKernel] = {"reference": reference, "simt": partial(_none, "simt")}
    _bind.register_confidence(library, key, kernels.get(name, _triton), one_launch=name != "reference")
