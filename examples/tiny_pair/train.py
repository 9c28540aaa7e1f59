"""Train a small target and its block-parallel drafter on two CPU cores, in about 85 minutes.

    python examples/tiny_pair/train.py --out examples/tiny_pair                          # a pair like the shipped one
    python examples/tiny_pair/train.py --out /tmp/pair --minutes 0.2 0.1 0.1 0.2         # does it run at all?

Stages: tokenizer; target on the standard library's sources; target against its own loops; the target's greedy text,
which is what the drafter has to predict; drafter.  Needs ``pip install "dcut_kernels[examples]"``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from data import EOS, MASK, corpus, encode, prompts, train_tokenizer, windows
from dcut_kernels.models import Config, Drafter, Target, load_target
from dense import draft_logits, greedy, labels, run_target

Model = TypeVar("Model", bound=nn.Module)

VOCAB, HIDDEN, HEAD_DIM = 2048, 192, 32
TARGET = Config(
    VOCAB, HIDDEN, 640, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, head_dim=HEAD_DIM
)
DRAFTER = Config(
    VOCAB, HIDDEN, 256, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=HEAD_DIM
)
FEATURE_LAYERS = (1, 4, 6)  # the drafter reads the hidden states after these target layers, counted from 0
DRAFT_LEN = 15
CONTEXT = 256  # tokens of a training window of the target
PROMPT, CONTINUATION = 64, 128  # tokens of a sequence that the drafter learns from
BATCH, ANCHORS = 16, 24  # sequences of a step; draft blocks of each sequence
WARM_UP, STEADY, FLOOR = 20, 0.4, 0.02  # learning rate: steps up, share of the time at the top, last factor
LOOP, LOOPS_RATE = 6, 0.1  # a repeated n-gram of this length is a loop; share of the learning rate against loops
NEAR = 7.0  # draft k weighs exp(-k / NEAR) in the loss: it counts only if all before it are accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    stages = ("TARGET", "LOOPS", "TEXT", "DRAFTER")
    parser.add_argument("--minutes", type=float, nargs=4, default=(22, 8, 6, 46), metavar=stages)
    parser.add_argument("--target", type=Path, metavar="DIR", help="a trained target: train a drafter for it only")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    texts, held_out = corpus()
    tokenizer = train_tokenizer(texts, VOCAB)
    stream = encode(tokenizer, texts)
    shown = json.dumps(prompts(tokenizer, held_out, 256), indent=0)
    (args.out / "prompts.json").write_text(shown + "\n", encoding="utf-8")
    print(f"{len(texts)} files, {len(stream):,} tokens, autocast to bfloat16: {fast_bfloat16()}", flush=True)

    for_target, for_loops, for_text, for_drafter = (60 * minutes for minutes in args.minutes)
    if args.target:
        target = load_target(args.target, FEATURE_LAYERS)
    else:
        target = initialize(Target(TARGET, FEATURE_LAYERS))
        compiled_target = torch.compile(target_loss)

        def on_corpus() -> Tensor:
            return compiled_target(target, windows(stream, BATCH, CONTEXT + 1))

        train(target, on_corpus, for_target, "target")
        train(target, against_loops(target, stream, on_corpus), for_loops, "loops", rate=LOOPS_RATE)
        round_to_bfloat16(target)
        export_target(target, tokenizer, args.out / "target")
    sequences = own_text(target, stream, for_text)
    drafter = initialize(Drafter(DRAFTER, FEATURE_LAYERS, DRAFT_LEN))
    compiled_drafter = torch.compile(drafter_loss)
    train(drafter, lambda: compiled_drafter(drafter, target, *some_blocks(sequences)), for_drafter, "drafter")
    round_to_bfloat16(drafter)
    export_drafter(drafter, tokenizer, args.out / "drafter")


def fast_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 ones here; without AMX they are slower."""
    return torch.cpu._is_amx_tile_supported()


def initialize(model: Model) -> Model:
    """Small random matrices; norms stay at one."""
    for name, parameter in model.named_parameters():
        if "embed" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
    return model


def target_loss(target: Target, tokens: Tensor) -> Tensor:
    hidden, _ = run_target(target, tokens[:, :-1])
    return F.cross_entropy(target.logits(hidden).flatten(0, 1).float(), tokens[:, 1:].flatten())


def against_loops(target: Target, stream: Tensor, on_corpus: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Loss of a batch that makes loops unlikely: that on the corpus, and one on the target's own greedy text.

    Sequence-level unlikelihood (Welleck et al., arXiv 1908.04319): a token that completes an n-gram which the text
    had before is pushed down.  The greedy text is written anew every few batches.
    """
    texts: list[Tensor] = []
    compiled_loops = torch.compile(loops_loss)

    def loss() -> Tensor:
        if not texts:
            texts.extend(greedy(target, windows(stream, 128, PROMPT), CONTINUATION).split(BATCH))
        own = texts.pop().clone()  # made in inference mode, which autograd refuses
        return on_corpus() + compiled_loops(target, own, repeats(own))

    return loss


def repeats(ids: Tensor) -> Tensor:
    """Whether the n-gram that ends with each token stands earlier in its row; [batch, length]."""
    grams = (ids.unfold(1, LOOP, 1) * VOCAB ** torch.arange(LOOP)).sum(-1)
    earlier = torch.ones(grams.shape[1], grams.shape[1], dtype=torch.bool).tril(-1)
    seen = ((grams[:, :, None] == grams[:, None]) & earlier).any(2)
    return F.pad(seen, (LOOP - 1, 0))


def loops_loss(target: Target, ids: Tensor, repeated: Tensor) -> Tensor:
    hidden, _ = run_target(target, ids[:, :-1])
    logits = target.logits(hidden[:, PROMPT - 1 :]).float()
    chosen = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[:, :, 0].exp()
    return -((1 - chosen).clamp(min=1e-4).log() * repeated[:, PROMPT:]).sum() / ids[:, PROMPT:].numel()


def some_blocks(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of sequences, and positions of bonus tokens in their generated part."""
    ids = sequences[torch.randint(0, len(sequences), (BATCH,))]
    return ids, torch.rand(BATCH, CONTINUATION - DRAFT_LEN).topk(ANCHORS).indices + PROMPT


def drafter_loss(drafter: Drafter, target: Target, ids: Tensor, anchors: Tensor) -> Tensor:
    """Cross-entropy against the target's own greedy text."""
    with torch.no_grad():
        _, features = run_target(target, ids)
    logits = draft_logits(drafter, target, ids, features, anchors)
    losses = F.cross_entropy(
        logits.flatten(0, 2).float(), labels(ids, anchors, DRAFT_LEN).flatten(), reduction="none"
    ).view(-1, DRAFT_LEN)
    weights = torch.exp(-torch.arange(DRAFT_LEN) / NEAR)
    return (losses * (weights / weights.sum())).sum(1).mean()


def train(model: nn.Module, loss_of_batch: Callable[[], Tensor], seconds: float, name: str, rate: float = 1.0) -> None:
    """Muon for matrices, AdamW for the rest; the schedule follows the clock, so a slow machine takes fewer steps."""
    model.train().requires_grad_(True)
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in named if p.dim() != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [rate * group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    start, steps, smooth = time.monotonic(), 0, None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=1.0)
        while (done := (time.monotonic() - start) / seconds) < 1:
            scale = min(1.0, (steps + 1) / WARM_UP, max(FLOOR, (1 - done) / (1 - STEADY)))
            for group, highest in zip(groups, rates, strict=True):
                group["lr"] = highest * scale
            with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16()):
                loss = loss_of_batch()
            model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            steps += 1
            smooth = loss.item() if smooth is None else 0.97 * smooth + 0.03 * loss.item()
            progress.update(task, completed=done, description=f"{name}: step {steps}, loss {smooth:.3f}")
            if steps % 200 == 0:
                print(f"{name}: step {steps}, loss {smooth:.3f}, {done:.0%}", flush=True)
    model.eval().requires_grad_(False)


def round_to_bfloat16(model: nn.Module) -> None:
    """Make the weights what the files hold: the drafter has to learn from the target that is shipped."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def own_text(target: Target, stream: Tensor, seconds: float) -> Tensor:
    """Prompts with the target's greedy continuations [n, PROMPT + CONTINUATION]."""
    parts: list[Tensor] = []
    start = time.monotonic()
    while not parts or time.monotonic() - start < seconds:
        parts.append(greedy(target, windows(stream, 128, PROMPT), CONTINUATION))
    print(f"{128 * len(parts)} sequences of the target's own text", flush=True)
    return torch.cat(parts)


def export_target(target: Target, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder that transformers and vLLM load as Qwen3ForCausalLM."""
    weights = {f"model.{name}": value for name, value in target.state_dict().items()}
    save_model(folder, {"architectures": ["Qwen3ForCausalLM"], **vars(TARGET)}, weights, tokenizer)


def export_drafter(drafter: Drafter, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that vLLM loads as the ``dflash`` drafter of the target."""
    dflash = {"mask_token_id": MASK, "target_layer_ids": list(FEATURE_LAYERS)}
    config = {"architectures": ["DFlashDraftModel"], **vars(DRAFTER), "block_size": DRAFT_LEN + 1,
              "num_target_layers": TARGET.num_hidden_layers, "dflash_config": dflash}  # fmt: skip
    weights = drafter.state_dict()
    mask = weights.pop("mask_embedding").bfloat16()
    save_model(folder, config, weights, tokenizer)
    # what engines put in place of the target's embedding of the mask token
    torch.save({"mask_token_id": MASK, "embedding": mask}, folder / "mask_embedding.pt")


def save_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    shared = {"model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
              "use_sliding_window": False, "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": EOS}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.bfloat16().contiguous() for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | shared, indent=1) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
