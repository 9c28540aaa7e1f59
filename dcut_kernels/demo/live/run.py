"""The live demo: measure step costs, decode with every policy in turn, show and save what happened."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from rich.console import Console
from tokenizers import Tokenizer

from ... import __version__
from ...cost import CostTable
from ...engine import Engine, Step, load_pair
from ...engine.policies import parse
from ...models import Drafter, Target
from ..compare import Comparison, compare
from ..report import count
from ..terminal import environment, make_console, progress_bar
from . import draw, plots, report, stream
from .measure import Turn, lengths, measure_costs, prompts_of, take_turns

COSTS = "step_costs.json"
MORE = "Try --prompt 'def main' (watch one text grow) or --replay (recorded drafts of other models); see --help."


class Pair(NamedTuple):
    """A target, its drafter, their tokenizer, and prompts."""

    target: Target
    drafter: Drafter
    tokenizer: Tokenizer
    prompts: list[list[int]]


def load(folder: Path) -> Pair:
    """Load a pair from its folder."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    texts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    return Pair(*load_pair(folder), tokenizer, [encoding.ids for encoding in tokenizer.encode_batch(texts)])


def run(args: argparse.Namespace, error: Callable[[str], NoReturn]) -> bool:
    """Run the demo with checked arguments; returns whether every text equals that of plain decoding.

    Parameters
    ----------
    args
        The command line.
    error
        Called with a message about arguments that do not suit the pair.
    """
    console, pair = make_console(), load(args.pair)
    console.print(
        f"dcut_kernels {__version__}: {args.pair.resolve().name}, drafts of {pair.drafter.draft_len}, "
        f"{count(torch.get_num_threads(), 'thread')}.",
    )
    for name in args.policy:
        try:
            parse(name, pair.drafter.draft_len)
        except ValueError as wrong:
            error(f"argument --{wrong}")
    if args.prompt is not None:
        run_stream(console, pair, args, error)
        return True
    if args.prompts > len(pair.prompts):
        error(f"argument --prompts: expected at most {len(pair.prompts)} with this pair, got {args.prompts}")
    return run_policies(console, pair, args)


def run_stream(console: Console, pair: Pair, args: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    """Decode one text and show each step as it commits."""
    try:
        prompt = pair.tokenizer.encode(args.prompt).ids
    except TypeError:  # as of bytes that are no UTF-8
        error(f"argument --prompt: expected text, got {args.prompt!r}")
    most = pair.target.config.max_position_embeddings - args.tokens - pair.drafter.draft_len
    if not 1 <= len(prompt) <= most:
        error(f"argument --prompt: expected 1 to {most} tokens, got {len(prompt)}")
    max_len = len(prompt) + args.tokens
    costs = costs_with_progress(console, pair, 1, max_len) if args.policy[0].startswith("dcut") else None
    engine = Engine(pair.target, pair.drafter, args.policy[0], costs, max_batch=1, max_len=max_len)
    console.print(stream.heading())
    steps: list[Step] = []

    def show(step: Step) -> None:
        if step.tokens:
            steps.append(step)
            console.print(stream.step_line(len(steps), step, pair.tokenizer.decode))

    (text,) = engine.generate([prompt], args.tokens, on_step=show)
    console.print(
        f"{count(len(text), 'token')} in {count(len(steps), 'step')}; {sum(sum(s.keep_lens) for s in steps)} of "
        f"{sum(int(s.drafts.draft_lens.sum()) for s in steps)} drafts verified, "
        f"{sum(sum(s.accepted) for s in steps)} accepted.\n",
        style="bold",
    )
    console.print(args.prompt, end="", markup=False, style="bright_black", soft_wrap=True)
    console.print(pair.tokenizer.decode(text), markup=False, soft_wrap=True)


def costs_with_progress(console: Console, pair: Pair, concurrency: int, max_len: int) -> CostTable:
    """Measure the step costs, with a progress bar."""
    with progress_bar(console) as progress:
        task = progress.add_task(f"{'step costs here':<16}", total=None)
        return measure_costs(
            pair.target, pair.drafter, concurrency, max_len, lambda total: progress.update(task, advance=1, total=total)
        )


def run_policies(console: Console, pair: Pair, args: argparse.Namespace) -> bool:
    """Compare all policies at every concurrency."""
    prompts = pair.prompts[: args.prompts]
    max_len = max(map(len, prompts)) + args.tokens
    costs = costs_with_progress(console, pair, max(args.concurrency), max_len)
    costs.save(args.out / COSTS)
    rows: list[dict[str, Any]] = []
    heat_map: Turn | None = None
    for concurrency in args.concurrency:
        chosen = prompts[: prompts_of(concurrency, args.prompts)]
        engines = {
            policy: Engine(pair.target, pair.drafter, policy, costs, max_batch=concurrency, max_len=max_len)
            for policy in args.policy
        }
        turns = turns_with_progress(console, engines, chosen, args, concurrency)
        rows += (table := table_rows(pair.target, chosen, turns, concurrency))
        if concurrency == max(args.concurrency) and "dcut" in turns:
            heat_map = turns["dcut"][0]
        texts = f"{count(len(chosen), 'text')} of {-(-args.tokens // 2)} to {args.tokens} tokens"
        title = f"{count(concurrency, 'request')} at a time, {texts}, {count(args.rounds, 'round')}"
        console.print(draw.policy_table(table, title, console.options.ascii_only))
        console.print()
    console.print(draw.COLUMNS)
    for sentence in report.closing_sentences(rows):
        console.print(sentence, style="bold")
    save(console, args, rows, costs, heat_map, pair.drafter.draft_len)
    return all(row["identical"] for row in rows)


def turns_with_progress(
    console: Console,
    engines: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    concurrency: int,
) -> dict[str, list[Turn]]:
    """Take turns, with a progress bar that counts tokens."""
    with progress_bar(console) as progress:
        total = args.rounds * len(engines) * sum(lengths(args.tokens, len(prompts)))
        task = progress.add_task("", total=total)

        def advance(policy: str, step: Step) -> None:
            progress.update(task, advance=step.tokens, description=f"{concurrency:>3} {policy:<12}")

        turns = take_turns(engines, prompts, args.tokens, args.rounds, advance)
        tokens = sum(step.tokens for mine in turns.values() for turn in mine for step in turn.steps)
        progress.update(task, total=tokens, description=f"{concurrency:>3} {'decoded':<12}")
    return turns


def table_rows(
    target: Target, prompts: Sequence[Sequence[int]], turns: dict[str, list[Turn]], concurrency: int
) -> list[dict[str, Any]]:
    """Rows of one concurrency; texts are compared with those of plain decoding in the first round."""
    expected = turns["ar"][0].texts
    return [
        report.policy_row(
            mine, turns["ar"], turns["full"], concurrency, compare_rounds(target, prompts, mine, expected)
        )
        for mine in turns.values()
    ]


def compare_rounds(
    target: Target, prompts: Sequence[Sequence[int]], turns: Sequence[Turn], expected: Sequence[Sequence[int]]
) -> Comparison:
    """Comparison of the round that differs most."""
    comparisons = [compare(target, prompts, turn.texts, expected) for turn in turns]
    return max(comparisons, key=lambda found: (len(found.different), found.ties))


def save(
    console: Console,
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    costs: CostTable,
    heat_map: Turn | None,
    draft_len: int,
) -> None:
    """Write the summary, the step costs and the plots."""
    names = ("concurrency", "prompts", "policy", "tokens", "rounds")
    arguments = {name: getattr(args, name) for name in names} | {"pair": str(args.pair), "out": str(args.out)}
    summary = {
        "schema_version": report.SCHEMA_VERSION,
        "arguments": arguments,
        "environment": environment() | {"threads": torch.get_num_threads(), "costs_of": str(costs.fingerprint)},
        "rows": list(rows),
    }
    path = args.out / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    saved = [path, args.out / COSTS, *plots.save_plots(args.out, rows, heat_map, draft_len)]
    console.print("Saved " + ", ".join(map(str, saved)), soft_wrap=True)
    console.print(MORE, markup=False)
