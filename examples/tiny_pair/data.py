"""Text that every machine has: the sources of Python's standard library, and a tokenizer for them."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

EOS, MASK = 0, 1  # token ids
HELD_OUT = 12  # one file in so many is never trained on
SKIP = ("test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo")


def corpus() -> tuple[list[str], list[str]]:
    """Texts to train on, and held-out texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not set(path.relative_to(root).parts) & set(SKIP)]
    random.Random(1).shuffle(files)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    held_out = max(1, len(texts) // HELD_OUT)
    return texts[held_out:], texts[:held_out]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; id 0 is <eos>, id 1 is <mask>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one stream of tokens, int64, each text ended by <eos>."""
    return torch.from_numpy(
        np.concatenate([np.array([*e.ids, EOS], dtype=np.int64) for e in tokenizer.encode_batch(texts)])
    )


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Random windows [count, length] of a stream."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def prompts(tokenizer: Tokenizer, texts: list[str], count: int) -> list[str]:
    """Prompts of 24 to 96 tokens, each from a line start of a held-out text on."""
    choose = random.Random(2)
    chosen: list[str] = []
    while len(chosen) < count:
        lines = choose.choice(texts).splitlines(keepends=True) or [""]
        text = "".join(lines[choose.randrange(len(lines)) :][:60])
        ids = tokenizer.encode(text).ids[: choose.randint(24, 96)]
        prompt = tokenizer.decode(ids)
        if len(ids) >= 24 and prompt not in chosen and tokenizer.encode(prompt).ids == ids:
            chosen.append(prompt)
    return chosen
