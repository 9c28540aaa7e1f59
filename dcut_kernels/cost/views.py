"""Cost tables for the eye; needs the extra ``demo``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._values import require
from .checks import problems
from .envelope import priced
from .table import CostTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}


def require_extra(module: str, purpose: str) -> None:
    """Raise ``ImportError`` with the command that installs a module, unless it is there."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose}: expected {module}, got none: pip install 'dcut_kernels[demo]'") from error


def as_rich(table: CostTable, title: str) -> Table:
    """Milliseconds and tokens of every bucket at every batch, the longer of the two downwards."""
    require_extra("rich", "show")
    from rich.table import Table

    columns = [["bucket", *table.rule.labels()]]
    for batch, costs in zip(table.batches, table.costs_ms, strict=True):
        cells = zip(table.rule.budgets(batch), costs, strict=True)
        columns.append([f"batch {batch}", *(_cell(budget, cost) for budget, cost in cells)])
    for name, times in (("plain", table.plain_ms), ("drafting", table.draft_ms)):
        if times is not None:
            columns[0].append(name)
            for column, time in zip(columns[1:], times, strict=True):
                column.append(f"{time:.3f} ms")
    lines = columns if len(columns) > len(columns[0]) else [list(line) for line in zip(*columns, strict=True)]
    mark = table.fingerprint
    caption = None if mark is None else f"{mark.device}, {mark.model}, {mark.engine}, {mark.dtype}, {mark.parallelism}"
    view = Table(title=title, caption=caption)
    for heading in lines[0]:
        view.add_column(heading, justify="right", no_wrap=True)
    for line in lines[1:]:
        view.add_row(*line)
    return view


def _cell(budget: int, cost: float) -> str:
    return f"{cost:.3f} ms, K {budget}" if priced(cost) else f"off, K {budget}"


def batches_off(table: CostTable) -> list[int]:
    """Batches at which every bucket that holds the bonus tokens is disabled."""
    found = problems(table, allow_flat=True)
    return [problem.batch for problem in found if problem.name == "disabled" and problem.batch is not None]


def plot(tables: Mapping[str, CostTable]) -> Figure:
    """Milliseconds by tokens, one line for each batch and one panel for each table.

    Parameters
    ----------
    tables : mapping of str to CostTable
        Tables by title.

    Raises
    ------
    ValueError
        If every bucket of a table is disabled.
    """
    for title, table in tables.items():
        drawable = len(batches_off(table)) < len(table.batches)
        require(title, drawable, "a bucket with a cost above 0 and below inf to draw", "none at any batch")
    require_extra("matplotlib", "plot")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.5 * len(tables), 4.5), layout="constrained")
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (title, table) in zip(panels, tables.items(), strict=True):
            colors = matplotlib.colormaps["viridis_r"]
            for place, (batch, costs) in enumerate(zip(table.batches, table.costs_ms, strict=True)):
                cells = zip(table.rule.budgets(batch), costs, strict=True)
                usable = [(budget, cost) for budget, cost in cells if budget >= batch and priced(cost)]
                color = colors(0.15 + 0.85 * (place + 1) / len(table.batches))
                if usable:
                    axes.plot(
                        *zip(*usable, strict=True), "o-", markersize=4, linewidth=0.8, color=color, label=str(batch)
                    )
                if table.plain_ms is not None:
                    axes.plot(batch, table.plain_ms[place], "D", markersize=6, markerfacecolor="none", color=color)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens of the step, bonus tokens included")
            axes.set_title(title, loc="left")
            axes.legend(title="batch", frameon=False, fontsize=9)
        plain = " (diamonds: plain decoding)" if any(table.plain_ms for table in tables.values()) else ""
        figure.axes[0].set_ylabel(f"milliseconds of a step{plain}")
    return figure
