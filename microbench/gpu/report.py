"""The results as text that a terminal and Markdown both show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = {
    "empty_us": "empty",
    "elementwise_us": "elementwise",
    "cuda_us": "CUDA",
    "cuda_per_empty": "/empty",
    "triton_us": "Triton",
    "triton_per_empty": "/empty",
    "eager_us": "eager",
    "compiled_us": "compiled",
    "eager_per_cuda": "eager/CUDA",
    "eager_per_triton": "eager/Triton",
    "cuda_host_us": "CUDA host",
    "triton_host_us": "Triton host",
}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return [text[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *text[1:]]


def _counts(part: dict[str, Any]) -> str:
    """What a part says about itself in a line."""
    said = [str(part[name]) for name in ("skipped", "error") if name in part]
    for name, value in part.items():
        if isinstance(value, dict) and "cases" in value:
            said.append(f"{name} {value['cases'] - value['failed']}/{value['cases']}")
            said += [f"{value['not_reached']} not reached"] if value.get("not_reached") else []
        elif name in ("memcheck", "racecheck", "synccheck"):
            said.append(f"{name} {value.partition(':')[0]}")
    return "; ".join(said).replace("\n", " ")[:200]


def report(path: Path) -> str:
    """Build the text from the results file."""
    parts = json.loads(path.read_text(encoding="utf-8"))
    lines = [", ".join(f"{name} {value}" for name, value in parts.get("machine", {}).items()), ""]
    ended = [
        (name, str(part.get("ended", "?")), f"{part.get('seconds', 0):.0f}", _counts(part))
        for name, part in parts.items()
        if name != "machine"
    ]
    lines += _table(("part", "ended", "s", "found"), ended)
    rows = parts.get("timing", {}).get("rows", [])
    if rows:
        columns = {name: title for name, title in COLUMNS.items() if any(name in row for row in rows)}
        cells = [[row["case"], *(f"{row[c]:.2f}" if c in row else "" for c in columns)] for row in rows]
        lines += ["", "Microseconds a call: in a CUDA graph, and by the host's clock (eager, compiled, host).", ""]
        lines += _table(("case", *columns.values()), cells)
    for goal in parts.get("timing", {}).get("goals", []):
        verdict = "met" if goal["met"] else "MISSED"
        lines += ["", f"{verdict}: {goal['goal']} {goal['bound']:.0f}: {goal['measured']:.2f}"]
    return "\n".join(lines) + "\n"
