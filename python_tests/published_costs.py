"""Published measurements as cost tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcut_kernels.cost import CostTable, from_ratios

DATA = Path(__file__).parent / "data"


def published(name: str, file: str = "cost_tables.json") -> dict[str, Any]:
    """One entry of a file of published numbers."""
    return json.loads((DATA / file).read_text(encoding="utf-8"))[name]


def by_number(values: dict[str, Any]) -> dict[int, Any]:
    """A mapping from numbers, which JSON keeps as strings."""
    return {int(key): value for key, value in values.items()}


def paper_table(device: str) -> CostTable:
    """The paper's whole steps of Qwen3-8B with 15 draft tokens, on "h20" or "h800"."""
    entry = published(f"{device}_qwen3_8b")
    return from_ratios(by_number(entry["rows"]), entry["ratios"], draft_len=15)
