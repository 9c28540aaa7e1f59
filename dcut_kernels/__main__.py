"""Command line: ``python -m dcut_kernels <command>``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from .demo.tables import TRACES, table_batches, table_names

DEMO_MODULES = ("numpy", "rich", "matplotlib")
TRACE_STEPS = 60
MAX_STEPS = 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m dcut_kernels", description="Draft-token selection and packing for batched speculative decoding."
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    args = parser.parse_args(arguments)
    args.handler(args)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    text = "replay recorded speculative steps through the op, against published step costs"
    demo = commands.add_parser("demo", help=text, description=text.capitalize() + ".")
    batches = sorted({batch for name in table_names() for batch in table_batches(name)})
    demo.add_argument(
        "--concurrency", type=int, default=64, choices=batches, metavar="N",
        help=f"requests decoded together, one of {', '.join(map(str, batches))} (default 64)",
    )  # fmt: skip
    demo.add_argument("--steps", type=int, default=60, metavar="N", help="steps to replay (default 60)")
    demo.add_argument(
        "--trace", choices=TRACES,
        help="replay one recorded run under full verification instead of the exact closed loop",
    )  # fmt: skip
    demo.add_argument(
        "--table", nargs="+", default=table_names(), choices=table_names(), metavar="NAME",
        help=f"published cost tables, of {', '.join(table_names())} (default: all)",
    )  # fmt: skip
    demo.add_argument(
        "--show", type=int, metavar="N", help="draw step N of D-cut with the first table, request by request"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR",
        help="where summary.json and the plots go (default out/demo)",
    )  # fmt: skip
    demo.set_defaults(handler=lambda args: _run_demo(demo, args))


def _run_demo(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    most = TRACE_STEPS if args.trace else MAX_STEPS
    if not 1 <= args.steps <= most:
        parser.error(f"argument --steps: expected 1 to {most}{' with --trace' if args.trace else ''}, got {args.steps}")
    if args.show is not None and not 1 <= args.show <= args.steps:
        parser.error(f"argument --show: expected a step from 1 to {args.steps}, got {args.show}")
    if not any(args.concurrency in table_batches(name) for name in args.table):
        rows = "; ".join(f"{name} has rows for {', '.join(map(str, table_batches(name)))}" for name in args.table)
        parser.error(f"argument --concurrency: {rows}; got {args.concurrency}")
    args.table = list(dict.fromkeys(args.table))
    for module in DEMO_MODULES:
        try:
            importlib.import_module(module)
        except ImportError:
            parser.exit(1, f"error: the demo needs {module}: pip install 'dcut_kernels[demo]'\n")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: expected a directory, got {args.out} ({error.strerror})")
    from .demo.run import run

    if not run(args):
        parser.exit(1, "error: generated texts differ from plain greedy decoding\n")


if __name__ == "__main__":
    main()
