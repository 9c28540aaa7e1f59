"""Terminal output: the table of policies, and one step drawn request by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .replay import Replay
from .report import count
from .tables import CostTable

BARS = "▁▂▃▄▅▆▇█"
CELL = 5  # columns of a token id with its mark
# kind of a draft position: mark that is readable without color, color, meaning
KINDS = {
    "bonus": ("=", "bold cyan", "bonus"),
    "accepted": ("+", "green", "kept, accepted"),
    "rejected": ("x", "red", "kept, rejected"),
    "missed": ("o", "bold yellow", "pruned but acceptable"),
    "pruned": (".", "bright_black", "pruned"),
}


def position_kinds(keep_len: int, acceptable: int, draft_len: int) -> list[str]:
    """Kind of each position of one request, bonus token first."""
    kept = ["accepted" if k < acceptable else "rejected" for k in range(keep_len)]
    return ["bonus", *kept, *("missed" if k < acceptable else "pruned" for k in range(keep_len, draft_len))]


def confidence_bar(confidence: Sequence[float], ascii_only: bool) -> str:
    """One character per draft token: eight heights of a bar, or the digits 0 to 9."""
    levels = "0123456789" if ascii_only else BARS
    return "".join(levels[min(int(c * len(levels)), len(levels) - 1)] for c in confidence)


def policy_table(rows: Sequence[dict[str, Any]], table: CostTable) -> Table:
    """The comparison of policies under one cost table; fits 80 columns."""
    ratios = "/".join(f"{round(100 * ratio)}" for ratio in table.ratios)
    title = f"{table.title}: {count(rows[0]['concurrency'], 'request')}, {count(rows[0]['steps'], 'step')}"
    view = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, title_justify="left")
    view.add_column("policy", no_wrap=True)
    names = ("verified\n/ step", "accepted\n/ step", "tokens /\nverified", "MAT", "tokens/s\nvs full")
    for name in (*names, f"steps at %\n{ratios}", "op time\n(us)"):
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            row["policy"],
            f"{row['verified_per_step']:.0f}",
            f"{row['accepted_per_step']:.1f}",
            f"{row['tokens_per_verified']:.3f}",
            f"{row['mat']:.2f}",
            f"{row['speedup']:.2f}x",
            "/".join(map(str, row["bucket_steps"])),
            f"{row['op_microseconds']:.0f}",
            style="bold" if row["policy"] == "D-cut" else "",
        )
    return view


def draw_step(console: Console, replay: Replay, number: int, table: CostTable) -> None:
    """Draw one step, a line per request.

    Parameters
    ----------
    console
        Where to draw; its width decides whether token ids fit.
    replay
        Replay of D-cut.
    number
        Step to draw, counted from 1.
    table
        Costs that the choice was made with.
    """
    index = number - 1
    step, keep_lens, acceptable = replay.steps[index], replay.keep_lens[index], replay.acceptable[index]
    batch, draft_len = step.draft_ids.shape
    label_width = max(7, len(str(step.request.max())))
    ids_width = label_width + 1 + CELL * (draft_len + 1) + 2 + draft_len
    with_ids = console.width >= ids_width
    console.print(
        f"Step {number}, D-cut with the costs of {table.title}: {replay.verified[index]} of {batch * (draft_len + 1)} "
        f"positions verified ({100 * table.ratios[replay.bucket[index]]:.0f} % bucket), "
        f"{replay.accepted[index].sum()} draft tokens accepted, "
        f"{(acceptable - replay.accepted[index]).sum()} acceptable ones pruned.",
        highlight=False,
    )
    console.print(legend())
    if not with_ids:
        console.print(f"Marks only: token ids need {ids_width} columns, this terminal has {console.width}.")
    body_width = (CELL if with_ids else 1) * (draft_len + 1)
    console.print(f"{'request':<{label_width}} {'draft':<{body_width}}  confidence", style="bold", highlight=False)
    for row in range(batch):
        line = Text(f"{step.request[row]:>{label_width}} ", no_wrap=True)
        tokens = [step.bonus_ids[row], *step.draft_ids[row]]
        for token, kind in zip(tokens, position_kinds(keep_lens[row], acceptable[row], draft_len), strict=True):
            mark, style, _ = KINDS[kind]
            line.append(f"{token:>{CELL - 1}}{mark}" if with_ids else mark, style=style)
        line.append("  " + confidence_bar(step.confidence[row], console.options.ascii_only))
        console.print(line)


def legend() -> Text:
    """Marks and colors of a drawn step."""
    return Text("  ").join(Text(f"{mark} {meaning}", style=style) for mark, style, meaning in KINDS.values())
