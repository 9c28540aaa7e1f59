"""PNG plots of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .recordings import Source
from .replay import Curve, Replay
from .report import count
from .tables import CostTable

matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
COLORS = ("#2a6f97", "#e07a5f")
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def save_plots(
    out: Path,
    rows: Sequence[dict[str, Any]],
    replays: Sequence[Replay],
    curve: Curve,
    tables: Sequence[CostTable],
    source: Source,
) -> list[Path]:
    """Write all plots to a directory and return their paths."""
    figures = {
        "speedup.png": speedup(rows, tables),
        "kept_depth.png": kept_depth(replays, tables),
        "accepted_vs_verified.png": accepted_vs_verified(curve, replays, source),
    }
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=130)
    return [out / name for name in figures]


def speedup(rows: Sequence[dict[str, Any]], tables: Sequence[CostTable]) -> Figure:
    """Modelled tokens/s relative to full depth, by policy and cost table."""
    policies = [row["policy"] for row in rows if row["table"] == tables[0].name]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(tables)
    for i, table in enumerate(tables):
        values = [row["speedup"] for row in rows if row["table"] == table.name]
        places = [k + (i - (len(tables) - 1) / 2) * height for k in range(len(values))]
        bars = axes.barh(places, values, height * 0.92, label=table.title, color=COLORS[i])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9, bbox=LABEL_BOX)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(policies)), policies)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("modeled tokens/s relative to full depth")
    axes.set_title(f"Speed by policy, {count(rows[0]['concurrency'], 'request')}, published step costs", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def kept_depth(replays: Sequence[Replay], tables: Sequence[CostTable]) -> Figure:
    """Draft tokens that D-cut keeps, by request and step, beside those the target would accept."""
    views: list[tuple[Replay, str]] = []  # one for each table, or for all tables that lead to the same choices
    for table in tables:
        dcut = next(replay for replay in replays if replay.policy.table == table.name)
        if views and np.array_equal(views[-1][0].keep_lens, dcut.keep_lens):
            views[-1] = (dcut, f"{views[-1][1]} and {table.name.upper()}")
        else:
            views.append((dcut, f"kept by D-cut, {table.title}"))
    figure = Figure(figsize=(9, 0.6 + 3.4 * len(views)), layout="constrained")
    grid = figure.subplots(len(views), 2, sharex=True, sharey=True, squeeze=False)
    for line, (dcut, title) in zip(grid, views, strict=True):
        steps, batch = dcut.keep_lens.shape
        panels = ((dcut.keep_lens, title), (dcut.acceptable, "accepted if the whole draft were verified"))
        for axes, (values, panel_title) in zip(line, panels, strict=True):
            image = axes.imshow(
                values.T,
                aspect="auto",
                interpolation="nearest",
                vmin=0,
                vmax=dcut.steps[0].draft_ids.shape[1],
                cmap="viridis",
                extent=(0.5, steps + 0.5, batch - 0.5, -0.5),
            )
            axes.set_title(panel_title, loc="left", fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_yticks(range(0, batch, max(1, batch // 8)))
        line[0].set_ylabel("row of the batch")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.colorbar(image, ax=grid, label="draft tokens", shrink=0.8)
    return figure


def accepted_vs_verified(curve: Curve, replays: Sequence[Replay], source: Source) -> Figure:
    """Accepted draft tokens against verified positions: best positions of the batch, and uniform depth.

    The curves apply every budget to the steps of full verification.  If the recording allows each policy to walk its
    own path, the fixed policies are added as hollow marks.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds = ((False, "o", "best positions of the batch", curve.top_k), (True, "s", "same depth for all", curve.uniform))
    for color, (uniform, marker, label, accepted) in zip(COLORS, kinds, strict=True):
        axes.plot(curve.verified, accepted, marker=marker, markersize=4, color=color, label=label)
        if source.exact:
            fixed = [r for r in replays if r.policy.ratio not in (None, 1.0) and r.policy.uniform == uniform]
            axes.plot(
                [r.verified.mean() for r in fixed],
                [r.accepted.sum(axis=1).mean() for r in fixed],
                marker,
                markersize=9,
                markerfacecolor="none",
                color=color,
                label=f"{label}, closed loop",
            )
    axes.axhline(curve.top_k[-1], color="gray", linestyle=":", linewidth=1, label="full depth")
    axes.set_xlabel("positions verified per step, bonus tokens included")
    axes.set_ylabel("draft tokens accepted per step")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"What a verification budget buys, on the steps of full depth ({source.name})", loc="left", fontsize=10
    )
    axes.legend(frameon=False, loc="lower right")
    return figure
