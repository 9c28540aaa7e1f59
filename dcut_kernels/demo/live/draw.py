"""The table of policies at one concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from ..draw import confidence_bar
from ..report import count

COLUMNS = (
    "vs ar, vs full: tokens/s relative to plain decoding and to full depth, median over the rounds, prompts included. "
    "MAT: tokens with bonus per drafting request and step. verified: positions a step, bonus tokens included, prompts "
    "not. accepted / verified: accepted drafts per verified position. ms of a step: mean. steps by depth: how many "
    "steps chose each bucket, 0 to all drafts a request on average, in halves up to 3 (. is none). same text: as plain "
    "decoding; a tie is a text that parts where float64 logits differ by less than 1e-4, so that rounding decides."
)


def policy_table(rows: Sequence[dict[str, Any]], title: str, ascii_only: bool) -> Table:
    """Comparison of policies at one concurrency; fits 110 columns."""
    buckets = max(len(row["bucket_steps"]) for row in rows)
    view = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, title_justify="left")
    view.add_column("policy", no_wrap=True)
    numbers = ("tok/s\nvs ar", "tok/s\nvs full", "MAT", "verified\n/ step", "accepted /\nverified")
    for name in (*numbers, "ms:\ndraft", "\nselect", "\nverify", "\nrest"):
        view.add_column(name, justify="right", no_wrap=True)
    if buckets > 0:
        view.add_column(f"steps by depth\n0{'all':>{max(buckets - 1, 4)}}", no_wrap=True)
    view.add_column("same text", no_wrap=True)
    for row in rows:
        cells = [
            row["policy"],
            f"{row['speedup_over_ar']:.2f}x",
            f"{row['speedup']:.2f}x",
            f"{row['mat']:.2f}",
            f"{row['verified']:.1f}",
            f"{row['accepted_per_verified']:.3f}",
            *map(milliseconds, row["milliseconds"].values()),
            *([histogram(row["bucket_steps"], ascii_only)] if buckets > 0 else []),
            same_text(row),
        ]
        view.add_row(*cells, style="bold" if row["policy"] == "dcut" else "")
    return view


def milliseconds(value: float) -> str:
    """Three digits or so."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def histogram(steps: Sequence[int], ascii_only: bool) -> str:
    """One character per bucket: a dot where it was never chosen, else a bar relative to the largest."""
    return "".join(confidence_bar([n / max(steps)], ascii_only) if n else "." for n in steps)


def same_text(row: dict[str, Any]) -> str:
    """Whether the texts are those of plain decoding."""
    if row["different"]:
        return f"NO ({row['different']})"
    return f"yes, {count(row['ties'], 'tie')}" if row["ties"] else "yes"
