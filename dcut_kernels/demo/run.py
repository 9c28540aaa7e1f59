"""The replay: run every policy, print tables, save the summary and the plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from .. import __version__, backends
from . import draw, plots, report
from .policies import all_policies
from .recordings import ClosedLoop, RecordedTrace, Source
from .replay import Replay, acceptance_curve, replay
from .tables import CostTable, cost_table, table_batches
from .terminal import environment, make_console, progress_bar

EXACT = (
    "Exact replay: drafts were recorded at every position of 64 greedy texts, so each policy walks its own path, "
    "as in a live engine. A finished request is replaced by the next text."
)
NOT_EXACT = (
    "Replay of one recorded run under full verification. Exact for full depth; the other policies are applied to the "
    "same steps (accepted = min(recorded, kept)), while in a live engine they would go on to other positions. "
    "Without --trace the replay is exact for all."
)
MODEL = (
    "Drafts come from a small recorded model pair, step costs from measurements published for Qwen3-8B: "
    "tokens/s is modeled as tokens a step over the published cost of the step's budget."
)
COLUMNS = (
    "verified: positions a step, bonus tokens included. accepted: draft tokens a step. tokens / verified: tokens with "
    "bonus per verified position. MAT: tokens with bonus per request and step. steps at %: steps at each budget. "
    "op time: median microseconds of one select_and_pack call into reused buffers (backend {backend}), measured on "
    "this CPU once a step between other work, so with cold caches."
)
MORE = "Try --concurrency 8 (other budgets win), --show 12 (draws a step) or --trace tiny_a_gen128, too; see --help."


def run(args: argparse.Namespace) -> bool:
    """Run the demo with parsed and checked arguments; returns whether every text equals plain greedy decoding."""
    console = make_console()
    tables = [cost_table(name, args.concurrency) for name in args.table if args.concurrency in table_batches(name)]

    def source() -> Source:
        return RecordedTrace(args.trace, args.concurrency) if args.trace else ClosedLoop(args.concurrency)

    console.print(
        f"dcut_kernels {__version__}: {source().name}, {report.count(args.concurrency, 'request')}, "
        f"{report.count(args.steps, 'step')}."
    )
    console.print(NOT_EXACT if args.trace else EXACT)
    console.print(MODEL)
    for name in args.table:
        if name not in [table.name for table in tables]:
            batches = ", ".join(map(str, table_batches(name)))
            console.print(
                f"{name} is left out: no cost was published for {report.count(args.concurrency, 'request')}, "
                f"only for {batches}.",
                style="bold yellow",
            )
    console.print()
    replays = replay_all(console, source, tables, args.steps)
    curve = acceptance_curve(replays[0])
    rows = [row for table in tables for row in report.table_rows(replays, table)]
    if args.show:
        dcut = next(r for r in replays if r.policy.table == tables[0].name)
        draw.draw_step(console, dcut, args.show, tables[0])
    for table in tables:
        console.print(draw.policy_table([row for row in rows if row["table"] == table.name], table))
        console.print()
    summary = report.summary(arguments(args), source(), replays, rows, curve, tables, environment())
    console.print(COLUMNS.format(backend=backends.chosen("cpu")))
    lossless = True
    if args.trace is None:
        counts = summary["replay"]
        lossless = counts["texts_equal_to_greedy"] == counts["texts_compared"]
        console.print(
            f"{counts['texts_equal_to_greedy']} of {counts['texts_compared']} generated texts (all policies, finished "
            "or under way) equal plain greedy decoding."
        )
    for sentence in report.closing_sentences(rows, tables):
        console.print(sentence, style="bold")
    path = args.out / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    saved = [path, *plots.save_plots(args.out, rows, replays, curve, tables, source())]
    console.print("Saved " + ", ".join(map(str, saved)), soft_wrap=True)
    console.print(MORE)
    return lossless


def replay_all(console: Console, source: Callable[[], Source], tables: list[CostTable], steps: int) -> list[Replay]:
    """Replay every policy, full depth first, each over a fresh source."""
    policies = all_policies(tables, source().draft_len)
    by_name = {table.name: table for table in tables}
    replays = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=steps * len(policies))
        for policy in policies:
            progress.update(task, description=f"{policy.name:<16}")
            table = by_name.get(policy.table or "", tables[0])
            replays.append(replay(source(), policy, table, steps, lambda: progress.advance(task)))
        progress.update(task, description=f"{'replayed':<16}")
    return replays


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON values."""
    names = ("concurrency", "steps", "trace", "table", "show")
    return {name: getattr(args, name) for name in names} | {"out": str(args.out)}
