"""PNG plots of the live demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..report import count
from .measure import Turn
from .report import PARTS, kept_depths

STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
FAMILIES = {"ar": "Greys", "full": "Greys", "uniform": "Blues", "ratio": "Oranges", "dcut": "Greens"}
PART_COLORS = ("#2a6f97", "#111111", "#e9c46a", "#bbbbbb")
DPI = 130


def save_plots(out: Path, rows: Sequence[dict[str, Any]], dcut: Turn | None, draft_len: int) -> list[Path]:
    """Write all plots to a directory and return their paths.

    Parameters
    ----------
    out
        Directory.
    rows
        Rows of all concurrencies.
    dcut
        A turn of D-cut at the largest concurrency.
    draft_len
        Drafts per request and step.
    """
    with matplotlib.rc_context(STYLE):
        figures = {"speedup.png": speedup(rows), "step_time.png": step_time(rows)}
        if dcut:
            figures["kept_depth.png"] = kept_depth(dcut, draft_len)
        for name, figure in figures.items():
            figure.savefig(out / name, dpi=DPI)
    return [out / name for name in figures]


def policy_colors(policies: Sequence[str]) -> dict[str, Any]:
    """A color for each policy; shades of one color for those of a family."""
    families = [policy.partition("-")[0] for policy in policies]
    colors = {}
    for number, (policy, family) in enumerate(zip(policies, families, strict=True)):
        shade = 0.9 - 0.5 * families[:number].count(family) / max(1, families.count(family))
        colors[policy] = matplotlib.colormaps[FAMILIES[family]](0.5 if policy == "ar" else shade)
    return colors


def speedup(rows: Sequence[dict[str, Any]]) -> Figure:
    """Tokens/s relative to full depth, by concurrency."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    places = list(dict.fromkeys(row["concurrency"] for row in rows))
    for policy, color in policy_colors(list(dict.fromkeys(row["policy"] for row in rows))).items():
        values = [row["speedup"] for row in rows if row["policy"] == policy]
        width, line = (2.8, "-") if policy == "dcut" else (1.4, "--" if policy == "ar" else "-")
        axes.plot(
            range(len(places)), values, line, marker="o", markersize=4, color=color, linewidth=width, label=policy
        )
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests decoded together")
    axes.set_ylabel("tokens/s relative to full depth")
    axes.set_title("Speed by concurrency, measured on this machine", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def step_time(rows: Sequence[dict[str, Any]]) -> Figure:
    """Mean time of a step by part, for each policy and concurrency."""
    places = list(dict.fromkeys(row["concurrency"] for row in rows))
    figure = Figure(figsize=(3 * len(places) + 1.5, 4.2), layout="constrained")
    for axes, place in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        mine = [row for row in rows if row["concurrency"] == place]
        bottom = np.zeros(len(mine))
        for part, color in zip(PARTS, PART_COLORS, strict=True):
            values = np.array([row["milliseconds"][part] for row in mine])
            axes.bar(range(len(mine)), values, bottom=bottom, color=color, label=part)
            bottom += values
        axes.set_xticks(range(len(mine)), [row["policy"] for row in mine], rotation=60, ha="right")
        axes.set_title(count(place, "request"), loc="left", fontsize=10)
    figure.axes[0].set_ylabel("milliseconds of a step")
    figure.axes[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def kept_depth(turn: Turn, draft_len: int) -> Figure:
    """Drafts that D-cut kept, by request and step; empty where a request had no drafts."""
    depths = np.array(kept_depths(turn))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    requests, steps = depths.shape
    extent = (0.5, steps + 0.5, requests - 0.5, -0.5)
    image = axes.imshow(
        depths, aspect="auto", interpolation="nearest", vmin=0, vmax=draft_len, cmap="viridis", extent=extent
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("request")
    axes.set_title("Drafts kept by D-cut", loc="left")
    figure.colorbar(image, ax=axes, label=f"drafts kept of {draft_len}")
    return figure
