"""One text as it grows: what each step accepted, rejected and never verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.text import Text

from ...engine import Step
from ..draw import KINDS

SHOWN = ("accepted", "bonus", "rejected", "pruned")


class Piece(NamedTuple):
    """Tokens of one kind, in their order."""

    kind: str  # of SHOWN
    tokens: list[int]


def pieces(step: Step) -> list[Piece]:
    """What happened to the one request of a step; the accepted drafts and the bonus token are its new text."""
    request, keep, accepted = step.requests[0], step.keep_lens[0], step.accepted[0]
    new = request.output[-step.tokens :]  # nothing in mid-prompt
    drafts = step.drafts.draft_ids[0, : int(step.drafts.draft_lens[0])].tolist()
    parts = (new[:accepted], new[accepted:], drafts[accepted:keep], drafts[keep:])
    return [Piece(kind, tokens) for kind, tokens in zip(SHOWN, parts, strict=True) if tokens]


def step_line(number: int, step: Step, decode: Callable[[list[int]], str]) -> Text:
    """A step as one line: drafts accepted, kept and drafted, then each piece with its mark."""
    drafts = int(step.drafts.draft_lens[0])
    line = Text(f"{number:>4}  {step.accepted[0]:>8} / {step.keep_lens[0]:>4} / {drafts:>7} ")
    for kind, tokens in pieces(step):
        mark, style, _ = KINDS[kind]
        line.append(f" {mark}{decode(tokens)!r}", style=style)
    return line


def heading() -> Text:
    """Marks and colors, and the columns of `step_line`."""
    marks = [Text(f"{KINDS[kind][0]} {KINDS[kind][2]}", style=KINDS[kind][1]) for kind in SHOWN]
    return Text("\n").join([Text("  ").join(marks), Text("step  accepted / kept / drafted  text", style="bold")])
