"""Command line: ``python -m dcut_kernels <command>``."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .cost.cli import add_commands as add_cost
from .demo.tables import TRACES, table_batches, table_names

DEMO_MODULES = ("numpy", "rich", "matplotlib", "tokenizers", "safetensors")
TRACE_STEPS = 60
MAX_STEPS = 10_000
LIMITS = {"concurrency": (1, 256), "prompts": (1, 256), "tokens": (2, 1024), "rounds": (1, 100)}
PAIR_FILES = (
    "target/config.json", "target/model.safetensors", "target/tokenizer.json",
    "drafter/config.json", "drafter/model.safetensors", "drafter/mask_embedding.pt", "prompts.json",
)  # fmt: skip
LIVE: dict[str, Any] = {
    "concurrency": [1, 8, 32, 64],
    "policy": ["ar", "full", "uniform-2", "uniform-3", "ratio-0.25", "dcut", "dcut-auto"],
    "tokens": 96,
    "rounds": 2,
    "pair": Path(__file__).resolve().parents[1] / "examples" / "tiny_pair",
    "out": Path("out/demo"),
}
REPLAY: dict[str, Any] = {"concurrency": [64], "steps": 60, "table": table_names(), "out": Path("out/replay")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m dcut_kernels", description="Draft-token selection and packing for batched speculative decoding."
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    add_cost(commands)
    args = parser.parse_args(arguments)
    try:
        args.handler(args)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")


def _add_demo(commands: argparse._SubParsersAction) -> None:
    text = "decode live with a small drafter and target and every policy, or replay recorded drafts"
    demo = commands.add_parser("demo", help=text, description=text.capitalize() + ".")
    batches = ", ".join(map(str, _replay_batches()))
    demo.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N",
        help=f"requests decoded together (default 1 8 32 64); with --replay one of {batches} (default 64)",
    )  # fmt: skip
    demo.add_argument(
        "--out", type=Path, metavar="DIR",
        help="where summary.json and the plots go (default out/demo, with --replay out/replay)",
    )  # fmt: skip
    live = demo.add_argument_group("live")
    live.add_argument(
        "--prompts", type=int, metavar="N",
        help="most prompts (default 64, or as many as requests); a concurrency decodes two per request",
    )  # fmt: skip
    live.add_argument(
        "--policy", nargs="+", metavar="NAME",
        help="of ar, full, dcut, dcut-early_stop, dcut-history, each of these three with -auto, uniform-K, ratio-R; ar "
        "and full always run "
        f"(default {' '.join(LIVE['policy'])})",
    )  # fmt: skip
    live.add_argument(
        "--tokens", type=int, metavar="N",
        help=f"most tokens of a text (default {LIVE['tokens']}); without --prompt texts differ, from half as many on",
    )  # fmt: skip
    live.add_argument("--rounds", type=int, metavar="N", help=f"turns of each policy (default {LIVE['rounds']})")
    live.add_argument("--prompt", metavar="TEXT", help="decode this one text and show each step; --policy default dcut")
    live.add_argument("--pair", type=Path, metavar="DIR", help="drafter and target (default examples/tiny_pair)")
    replay = demo.add_argument_group("replay", "recorded drafts against published step costs")
    replay.add_argument("--replay", action="store_true", help="replay instead of decoding live")
    replay.add_argument("--steps", type=int, metavar="N", help="steps to replay (default 60)")
    replay.add_argument(
        "--trace", choices=TRACES,
        help="replay one recorded run under full verification instead of the exact closed loop",
    )  # fmt: skip
    replay.add_argument(
        "--table", nargs="+", choices=table_names(), metavar="NAME",
        help=f"published cost tables, of {', '.join(table_names())} (default: all)",
    )  # fmt: skip
    replay.add_argument(
        "--show", type=int, metavar="N", help="draw step N of D-cut with the first table, request by request"
    )
    demo.set_defaults(handler=lambda args: _run_demo(demo, args))


def _run_demo(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.replay:
        _refuse(parser, args, ("prompts", "policy", "tokens", "rounds", "prompt", "pair"), "without --replay")
        _check_replay(parser, args)
    else:
        _refuse(parser, args, ("steps", "trace", "table", "show"), "with --replay")
        if args.prompt is not None:
            _refuse(parser, args, ("concurrency", "prompts", "rounds", "out"), "without --prompt")
        _check_live(parser, args)
    for module in DEMO_MODULES:
        try:
            importlib.import_module(module)
        except ImportError:
            parser.exit(1, f"error: the demo needs {module}: pip install 'dcut_kernels[demo]'\n")
    if not args.replay:
        _check_policies(parser, args)
    if args.prompt is None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.out).close()
        except OSError as error:
            parser.error(f"argument --out: expected a directory to write to, got {args.out} ({error.strerror})")
    if args.replay:
        from .demo.run import run as replay

        same = replay(args)
    else:
        from .demo.live.run import run as live

        same = live(args, parser.error)
    if not same:
        parser.exit(1, "error: generated texts differ from plain greedy decoding\n")


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Refuse options that belong to another mode."""
    for name in names:
        if (value := getattr(args, name)) is not None:
            parser.error(f"argument --{name}: expected only {where}, got {_shown(value)}")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _fill_in(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _check_live(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.prompt is not None:
        _fill_in(args, {"policy": ["dcut"]})
        if len(args.policy) > 1:
            parser.error(f"argument --policy: expected one policy with --prompt, got {_shown(args.policy)}")
    _fill_in(args, LIVE)
    _fill_in(args, {"prompts": max(64, *args.concurrency)})
    for name, (least, most) in LIMITS.items():
        value = getattr(args, name)
        if not all(least <= number <= most for number in (value if isinstance(value, list) else [value])):
            parser.error(f"argument --{name}: expected {least} to {most}, got {_shown(value)}")
    if args.prompts < max(args.concurrency):
        parser.error(
            f"argument --prompts: expected at least {max(args.concurrency)}, the largest --concurrency, "
            f"got {args.prompts}"
        )
    args.concurrency = list(dict.fromkeys(args.concurrency))
    missing = [name for name in PAIR_FILES if not (args.pair / name).is_file()]
    if missing:
        parser.error(
            f"argument --pair: expected a folder with {', '.join(PAIR_FILES)}, got {args.pair} without {missing[0]}; "
            "give --pair DIR, or --replay to see recorded drafts"
        )


def _check_policies(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from .engine.policies import parse

    for name in args.policy:
        try:
            parse(name)
        except ValueError as error:
            parser.error(f"argument --{error}")
    if args.prompt is None:  # what all others are compared with comes first
        args.policy = list(dict.fromkeys(["ar", "full", *args.policy]))


def _check_replay(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    _fill_in(args, REPLAY)
    if len(args.concurrency) > 1:
        parser.error(f"argument --concurrency: expected one number with --replay, got {_shown(args.concurrency)}")
    (args.concurrency,) = args.concurrency
    batches = _replay_batches()
    if args.concurrency not in batches:
        choices = ", ".join(map(str, batches))
        parser.error(f"argument --concurrency: invalid choice: {args.concurrency} (choose from {choices})")
    most = TRACE_STEPS if args.trace else MAX_STEPS
    if not 1 <= args.steps <= most:
        parser.error(f"argument --steps: expected 1 to {most}{' with --trace' if args.trace else ''}, got {args.steps}")
    if args.show is not None and not 1 <= args.show <= args.steps:
        parser.error(f"argument --show: expected a step from 1 to {args.steps}, got {args.show}")
    if not any(args.concurrency in table_batches(name) for name in args.table):
        rows = "; ".join(f"{name} has rows for {', '.join(map(str, table_batches(name)))}" for name in args.table)
        parser.error(f"argument --concurrency: {rows}; got {args.concurrency}")
    args.table = list(dict.fromkeys(args.table))


def _replay_batches() -> list[int]:
    return sorted({batch for name in table_names() for batch in table_batches(name)})


if __name__ == "__main__":
    main()
