"""Measure a pair on held-out text; writes card.json and reliability.png into its folder.

    python examples/tiny_pair/evaluate.py                     # the shipped pair
    python examples/tiny_pair/evaluate.py --pair /tmp/pair

Needs ``pip install "dcut_kernels[examples]"``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import mannwhitneyu, spearmanr
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data import EOS, corpus, encode, windows
from dcut_kernels.models import Drafter, Target, load_pair
from dense import draft_logits, greedy, labels, run_target
from train import CONTEXT, NEAR

TOKENS = 128  # of each text
DEPTHS = (7, 15)  # drafts per step; 7 are the first of a block of 15
WINDOWS = 256  # of held-out text, CONTEXT tokens each
GRAM, DISTINCT = 8, 0.6  # a text loops if fewer than this share of its 8-grams are distinct
BINS = 10  # of the score, for the reliability
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WEIGHTS = ("target/model.safetensors", "drafter/model.safetensors", "drafter/mask_embedding.pt")
FILES = (*WEIGHTS, "target/tokenizer.json", "prompts.json")  # what the figures depend on


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent, metavar="DIR")
    folder = parser.parse_args().pair
    card = evaluate(folder)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    plot(card).savefig(folder / "reliability.png", dpi=120)
    table = Table("figure", "value", title=f"{folder}: {card['texts']['prompts']} held-out prompts")
    for figure in figures(card):
        table.add_row(*figure)
    Console().print(table)


def evaluate(folder: Path) -> dict[str, Any]:
    """All figures of a pair, as card.json has them."""
    target, drafter = load_pair(folder)
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    shown = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(shown)]
    sequences = generate(target, prompts)
    texts = [until_eos(ids[len(prompt) :].tolist()) for ids, prompt in zip(sequences, prompts, strict=True)]
    scores, accepted, losses = draft(target, drafter, sequences, [len(prompt) for prompt in prompts])
    # anchors of each text whose drafts all have a token of the text to be compared with
    anchors = [max(0, len(text) - drafter.draft_len) for text in texts]
    held = np.arange(accepted.shape[1]) < np.array(anchors)[:, None]
    looping = np.array([loops(text) for text in texts])
    longest = accepted.sum(2)
    mean_losses = losses[held].mean(0)
    weights = np.exp(-np.arange(drafter.draft_len) / NEAR)
    return {
        "python": platform.python_version(),
        "files": {name: describe((folder / name).read_bytes()) for name in FILES},
        "target": {"parameters": parameters(target)} | language_model(target, tokenizer, corpus()[1]),
        "drafter": {
            "parameters": parameters(drafter),
            "loss": float(mean_losses @ weights / weights.sum()),
            "acceptance_of_draft": acceptance_by_position(longest[held], drafter.draft_len),
        },
        "texts": {
            "prompts": len(prompts),
            "tokens": TOKENS,
            "anchors": int(held.sum()),
            "ended": float(np.mean([text[-1] == EOS for text in texts])),
            "looping": float(looping.mean()),
        },
        "depths": {str(d): at_depth(scores[..., :d], accepted[..., :d], anchors, looping) for d in DEPTHS},
    }


def describe(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def language_model(target: Target, tokenizer: Tokenizer, held_out: list[str]) -> dict[str, Any]:
    """Loss of the target on windows of held-out text."""
    rows = windows(encode(tokenizer, held_out), WINDOWS, CONTEXT + 1, torch.Generator().manual_seed(0))
    loss = 0.0
    for part in rows.split(16):
        logits = target.logits(run_target(target, part[:, :-1])[0])
        loss += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    tokens, size = rows[:, 1:].numel(), int(byte_counts(tokenizer)[rows[:, 1:]].sum())
    return {
        "held_out_tokens": tokens,
        "held_out_bytes": size,
        "loss_per_token": loss / tokens,
        "bits_per_byte": loss / math.log(2) / size,
    }


def byte_counts(tokenizer: Tokenizer) -> Tensor:
    """Bytes that each token of a byte-level vocabulary stands for, int64 [vocab]: one per character, <eos> for none."""
    counts = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for token, i in tokenizer.get_vocab().items():
        counts[i] = 0 if i == EOS else len(token)
    return counts


def generate(target: Target, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Each prompt with its greedy continuation; prompts of one length run together."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[len(prompt)].append(row)
    sequences: dict[int, Tensor] = {}
    for rows in rows_of.values():
        batch = greedy(target, torch.tensor([prompts[row] for row in rows]), TOKENS)
        sequences.update(zip(rows, batch, strict=True))
    return [sequences[row] for row in range(len(prompts))]


@torch.inference_mode()
def draft(
    target: Target, drafter: Drafter, sequences: list[Tensor], starts: list[int]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Draft after every generated token that `draft_len` more follow.

    Returns
    -------
    scores, accepted, losses : ndarray [n, M, D]
        The product of the confidences up to each draft, whether all drafts up to it are right, and the loss.
    """
    ids = pad_sequence(sequences, batch_first=True)
    anchors = torch.tensor(starts)[:, None] + torch.arange(TOKENS - drafter.draft_len)
    rows = []
    for some_ids, some_anchors in zip(ids.split(8), anchors.split(8), strict=True):
        _, features = run_target(target, some_ids)
        parts = []
        for columns in some_anchors.split(16, 1):
            log_probs = draft_logits(drafter, target, some_ids, features, columns).log_softmax(-1)
            truth = labels(some_ids, columns, drafter.draft_len)
            confidence, drafts = log_probs.max(-1)
            loss = -log_probs.gather(-1, truth[..., None])[..., 0]
            accepted = (drafts == truth).cumprod(-1)
            parts.append(torch.stack([confidence.cumsum(-1).exp(), accepted.float(), loss]))
        rows.append(torch.cat(parts, 2))
    scores, right, losses = torch.cat(rows, 1).double().numpy()
    return scores, right.astype(np.int64), losses


def until_eos(text: list[int]) -> list[int]:
    """Tokens up to the first <eos>, which is kept."""
    return text[: text.index(EOS) + 1] if EOS in text else text


def loops(text: Sequence[int]) -> bool:
    """Whether fewer than DISTINCT of the 8-grams of a text are distinct."""
    grams = [tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)]
    return len(set(grams)) < DISTINCT * len(grams)


def walk(longest: Sequence[int]) -> list[int]:
    """Drafts accepted in each step, from how many would be accepted after each token of a text.

    A step moves on by what it accepts and the bonus token.
    """
    steps, anchor = [], 0
    while anchor < len(longest):
        steps.append(int(longest[anchor]))
        anchor += steps[-1] + 1
    return steps


def acceptance_by_position(longest: NDArray[Any], draft_len: int) -> list[float | None]:
    """Share of the k-th drafts that are accepted where all before them were; None where none were."""
    reached = [int((longest >= k).sum()) for k in range(draft_len + 1)]
    return [after / before if before else None for before, after in pairwise(reached)]


def ranking(scores: NDArray[Any], accepted: NDArray[Any]) -> dict[str, float]:
    """How well scores rank drafts by acceptance: AUROC and Spearman correlation, ties counted half."""
    yes, no = scores[accepted == 1], scores[accepted == 0]
    return {
        "auroc": float(mannwhitneyu(yes, no).statistic / (len(yes) * len(no))),
        "spearman": float(spearmanr(scores, accepted).statistic),
    }


def reliability(scores: NDArray[Any], accepted: NDArray[Any]) -> list[dict[str, float]]:
    """Mean score and acceptance of the drafts of each tenth of the score's range; empty ones are left out."""
    of_draft = np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    return [
        {
            "score": float(scores[of_draft == number].mean()),
            "accepted": float(accepted[of_draft == number].mean()),
            "drafts": int((of_draft == number).sum()),
        }
        for number in np.unique(of_draft)
    ]


def calibration_error(bins: Sequence[dict[str, float]]) -> float:
    """Mean distance of score and acceptance, each bin weighted by its drafts."""
    total = sum(one["drafts"] for one in bins)
    return sum(one["drafts"] * abs(one["score"] - one["accepted"]) for one in bins) / total


def at_depth(
    scores: NDArray[Any], accepted: NDArray[Any], anchors: Sequence[int], looping: NDArray[np.bool_]
) -> dict[str, Any]:
    """Figures at one number of drafts; scores and accepted [n, M, D], of which the first `anchors` per text count."""
    longest = accepted.sum(2)
    walks = [walk(row[:count]) for row, count in zip(longest, anchors, strict=True)]
    flat = [np.concatenate([row[:n].ravel() for row, n in zip(x, anchors, strict=True)]) for x in (scores, accepted)]
    bins = reliability(*flat)
    return {
        "mat": mat(walks),
        "mat_of_requests": quantiles([mat([steps]) for steps in walks if steps]),
        "mat_without_loops": mat([steps for steps, loop in zip(walks, looping, strict=True) if not loop]),
        "steps_by_accepted": np.bincount(
            [accepted_drafts for steps in walks for accepted_drafts in steps], minlength=accepted.shape[2] + 1
        ).tolist(),
        **ranking(*flat),
        "calibration_error": calibration_error(bins),
        "reliability": bins,
    }


def mat(walks: Sequence[Sequence[int]]) -> float:
    """Tokens per step of all requests, bonus token included; nan if there are no steps."""
    steps = [accepted for steps in walks for accepted in steps]
    return sum(steps) / len(steps) + 1 if steps else math.nan


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"{100 * q:.0f} %": float(np.quantile(values, q)) for q in QUANTILES}


def plot(card: dict[str, Any]) -> Figure:
    """Score against acceptance, and the drafts accepted per step."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="0.7", label="perfect")
    for depth, values in card["depths"].items():
        bins = values["reliability"]
        left.plot([b["score"] for b in bins], [b["accepted"] for b in bins], marker="o", label=f"D = {depth}")
    left.set(xlabel="product of confidences up to a draft", ylabel="share of drafts accepted", title="Reliability")
    left.legend()
    depth, values = max(card["depths"].items(), key=lambda item: int(item[0]))
    steps = np.array(values["steps_by_accepted"])
    right.bar(np.arange(len(steps)), steps / steps.sum())
    right.set(xlabel="drafts accepted in a step", ylabel="share of steps", title=f"Steps at D = {depth}")
    return figure


def figures(card: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that the console and the model card show."""
    target, drafter, texts, depths = (card[name] for name in ("target", "drafter", "texts", "depths"))
    shown = [
        ("parameters of the target", f"{target['parameters']:,}"),
        ("parameters of the drafter", f"{drafter['parameters']:,}"),
        ("weights of both", f"{sum(card['files'][name]['bytes'] for name in WEIGHTS) / 1e6:.2f} MB"),
        ("target, bits per byte of held-out text", f"{target['bits_per_byte']:.3f}"),
        ("target, loss per token of held-out text", f"{target['loss_per_token']:.3f}"),
        ("drafter, loss on the target's texts", f"{drafter['loss']:.3f}"),
        ("texts that loop", f"{texts['looping']:.1%}"),
        ("texts that end by themselves", f"{texts['ended']:.1%}"),
    ]
    for depth, values in depths.items():
        shown += [
            (f"MAT, D = {depth}", f"{values['mat']:.2f}"),
            (f"MAT of texts that do not loop, D = {depth}", f"{values['mat_without_loops']:.2f}"),
            (f"AUROC of the score, D = {depth}", f"{values['auroc']:.3f}"),
            (f"Spearman correlation of the score, D = {depth}", f"{values['spearman']:.3f}"),
            (f"calibration error of the score, D = {depth}", f"{values['calibration_error']:.3f}"),
        ]
        spread = [values["mat_of_requests"][q] for q in ("10 %", "50 %", "90 %")]
        shown.append((f"MAT of a request, 10 % / median / 90 %, D = {depth}", " / ".join(f"{x:.2f}" for x in spread)))
    for k in (1, 2, 4, 8):
        share = drafter["acceptance_of_draft"][k - 1]
        value = "-" if share is None else f"{share:.1%}"
        shown.append((f"acceptance of draft {k} where all before are accepted", value))
    return shown


if __name__ == "__main__":
    main()
