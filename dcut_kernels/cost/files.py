"""Cost tables as JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ._values import require, sequence
from .fingerprint import Fingerprint
from .rules import RULES, Rule

if TYPE_CHECKING:
    from .table import CostTable

SCHEMA_VERSION = 1
KEYS = ("schema_version", "rule", "batches", "costs_ms", "plain_ms", "draft_ms", "fingerprint")


def write(path: Path, table: CostTable) -> None:
    """Write a table; see `CostTable.save`."""
    for batch, costs in zip(table.batches, table.costs_ms, strict=True):
        for cost in costs:
            require("costs_ms", cost > -math.inf, f"numbers or inf at batch {batch}", cost)
    content = asdict(table) | {
        "schema_version": SCHEMA_VERSION,
        "rule": {"rule": table.rule.name} | asdict(table.rule),  # type: ignore[call-overload]
        "costs_ms": [[None if math.isinf(cost) else cost for cost in costs] for costs in table.costs_ms],
    }
    lines = (f'"{key}": {json.dumps(content[key], allow_nan=False)}' for key in KEYS)
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # another process may read at any time
    partial.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Fields of a `CostTable`, from a file that `write` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    require(str(path), isinstance(content, dict), "a JSON object", type(content).__name__)
    version = content.get("schema_version", "none")
    require(f"{path}: schema_version", type(version) is int and version == SCHEMA_VERSION, SCHEMA_VERSION, version)
    try:
        _keys("keys", content, KEYS)
        return {
            "batches": content["batches"],
            "costs_ms": [_costs(row) for row in sequence("costs_ms", content["costs_ms"])],
            "rule": _rule(content["rule"]),
            "plain_ms": content["plain_ms"],
            "draft_ms": content["draft_ms"],
            "fingerprint": _fingerprint(content["fingerprint"]),
        }
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _keys(name: str, content: dict[str, Any], expected: tuple[str, ...]) -> None:
    missing, unknown = [key for key in expected if key not in content], [key for key in content if key not in expected]
    require(name, not missing, f"{', '.join(expected)}", f"none named {', '.join(missing)}")
    require(name, not unknown, f"{', '.join(expected)}", ", ".join(unknown))


def _costs(row: Any) -> tuple[Any, ...]:
    costs = sequence("costs_ms", row)
    # JSON has no infinity, but Python reads 1e999 as one
    require("costs_ms", not any(isinstance(cost, float) and math.isinf(cost) for cost in costs), "finite numbers", row)
    return tuple(math.inf if cost is None else cost for cost in costs)


def _rule(content: Any) -> Rule:
    require("rule", isinstance(content, dict), "an object", repr(content))
    name = content.get("rule")
    require("rule", isinstance(name, str) and name in RULES, f"one of {', '.join(RULES)}", repr(name))
    kind = RULES[name]
    names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    _keys("rule", content, ("rule", *names))
    return kind(**{name: content[name] for name in names})


def _fingerprint(content: Any) -> Fingerprint | None:
    if content is None:
        return None
    require("fingerprint", isinstance(content, dict), "an object or null", repr(content))
    names = tuple(field.name for field in fields(Fingerprint))
    _keys("fingerprint", content, names)
    return Fingerprint(**content)
