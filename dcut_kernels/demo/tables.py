"""Published step costs, and where they and the recordings come from.  Needs no optional package."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

TRACES = ("tiny_a", "tiny_a_gen128")


class CostTable(NamedTuple):
    """Published cost of a whole step at one batch size."""

    name: str
    title: str
    source: str
    ratios: list[float]
    costs: list[float]  # milliseconds, one a ratio


@functools.cache
def sources() -> dict[str, Any]:
    """Content of ``data/sources.json``: the cost tables, and where everything comes from."""
    return json.loads((resources.files(__package__) / "data" / "sources.json").read_text(encoding="utf-8"))


def table_names() -> list[str]:
    """Names of the published cost tables."""
    return list(sources()["cost_tables"])


def table_batches(name: str) -> list[int]:
    """Batch sizes for which a table has a published row."""
    return [int(batch) for batch in sources()["cost_tables"][name]["rows"]]


def cost_table(name: str, batch: int) -> CostTable:
    """Costs of a table at one of its `table_batches`."""
    table = sources()["cost_tables"][name]
    return CostTable(name, table["title"], table["source"], table["ratios"], table["rows"][str(batch)])
