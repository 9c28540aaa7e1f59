"""``python -m dcut_kernels cost``: looks at cost tables, checks and merges them."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from .build import merge
from .checks import problems
from .table import CostTable
from .views import as_rich, batches_off, plot


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add ``cost`` to a command line."""
    text = "show, plot, check or merge measured cost tables"
    cost = commands.add_parser("cost", help=text, description=text.capitalize() + ".")
    actions = cost.add_subparsers(title="commands", metavar="command", required=True)
    _add(actions, "show", _show, "milliseconds and tokens of every bucket")
    drawn = _add(actions, "plot", _plot, "draw milliseconds by tokens")
    drawn.add_argument("--out", type=Path, required=True, metavar="PNG", help="where the plot goes")
    checked = _add(actions, "check", _check, "explain what is wrong with a table; the exit status is 1 if anything is")
    checked.add_argument("--allow-flat", action="store_true", help="accept costs that hardly grow with the tokens")
    merged = _add(actions, "merge", _merge, "join the batches of tables that were measured alike")
    merged.add_argument("--out", type=Path, required=True, metavar="TABLE", help="where the joined table goes")


def _add(
    actions: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.ArgumentParser, argparse.Namespace, dict[Path, CostTable]], None],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="JSON that CostTable.save wrote")
    parser.set_defaults(handler=functools.partial(_run, parser, run))
    return parser


def _run(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.ArgumentParser, argparse.Namespace, dict[Path, CostTable]], None],
    args: argparse.Namespace,
) -> None:
    tables = {}
    for path in args.tables:
        if path in tables:
            parser.error(f"argument TABLE: expected each file once, got {path} twice")
        try:
            tables[path] = CostTable.load(path)
        except OSError as error:
            parser.error(f"argument TABLE: expected a cost table, got {path} ({error.strerror})")
        except ValueError as error:
            parser.error(f"argument TABLE: {error}")
    try:
        run(parser, args, tables)
    except ImportError as error:
        parser.exit(1, f"error: {error}\n")
    except OSError as error:
        parser.error(f"argument --out: expected a file to write, got {args.out} ({error.strerror})")


def _show(parser: argparse.ArgumentParser, args: argparse.Namespace, tables: dict[Path, CostTable]) -> None:
    views = [as_rich(table, path.name) for path, table in tables.items()]
    from ..demo.terminal import make_console

    console = make_console()
    for view in views:
        console.print(view)
    _say_what_is_off(tables)


def _plot(parser: argparse.ArgumentParser, args: argparse.Namespace, tables: dict[Path, CostTable]) -> None:
    if args.out.suffix.lower() != ".png":
        parser.error(f"argument --out: expected a name that ends in .png, got {args.out}")
    try:
        figure = plot({path.stem: table for path, table in tables.items()})
    except ValueError as error:
        parser.error(f"argument TABLE: {error}")
    figure.savefig(args.out, format="png", dpi=130)
    print(args.out)
    _say_what_is_off(tables)


def _say_what_is_off(tables: dict[Path, CostTable]) -> None:
    """Name the batches of which a table shows no cost."""
    for path, table in tables.items():
        if batches := batches_off(table):
            where = f"batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches))}"
            print(f"{path}: no bucket that holds the bonus tokens has a cost at {where}", file=sys.stderr)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, tables: dict[Path, CostTable]) -> None:
    bad = False
    for path, table in tables.items():
        found = problems(table, args.allow_flat)
        bad = bad or bool(found)
        for problem in found:
            print(f"{path}: {problem.name}: {problem.explanation}")
        if not found:
            print(f"{path}: no problems in {len(table.batches)} batches of {len(table.rule.labels())} buckets")
    if bad:
        parser.exit(1)


def _merge(parser: argparse.ArgumentParser, args: argparse.Namespace, tables: dict[Path, CostTable]) -> None:
    try:
        merged = merge(list(tables.values()))
    except ValueError as error:
        parser.error(f"argument TABLE: {error} ({', '.join(map(str, tables))})")
    merged.save(args.out)
    print(args.out)
