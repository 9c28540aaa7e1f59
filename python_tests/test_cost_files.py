"""A saved table is the same when it is loaded, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcut_kernels.cost import AngelSlimRatios, CostTable, Fingerprint, PaperRatios, TokenCounts

HERE = Fingerprint("H20", "Qwen3-8B", "engine 1.0", "bfloat16", "tp1")
COSTS = (1.0, math.inf, 3.25), (2.0, 0.1 + 0.2, 4.0)
TABLE = CostTable((1, 8), COSTS, PaperRatios((0.25, 0.3, 1.0), 15), (0.5, 1.5), (0.0, 0.25), HERE)


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        replace(TABLE, rule=AngelSlimRatios((0, 1 / 15, 1), 15), plain_ms=None, draft_ms=None, fingerprint=None),
        replace(TABLE, rule=TokenCounts((8, 16, 32))),
    ],
)
def test_round_trip(table: CostTable, tmp_path: Path) -> None:
    table.save(path := tmp_path / "costs.json")
    assert CostTable.load(path) == table
    assert CostTable.load(str(path), expect=table.fingerprint) == table


def test_disabled_is_null_and_nan_is_refused(tmp_path: Path) -> None:
    TABLE.save(path := tmp_path / "costs.json")
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    content = json.loads(text)
    assert content["costs_ms"][0] == [1.0, None, 3.25]
    assert content["schema_version"] == 1
    assert content["rule"] == {"rule": "paper", "ratios": [0.25, 0.3, 1.0], "draft_len": 15}
    for cost in (math.nan, -math.inf):
        bad = replace(TABLE, costs_ms=((1.0, 2.0, 3.0), (1.0, cost, 3.0)))
        with pytest.raises(ValueError, match=rf"^costs_ms: expected numbers or inf at batch 8, got {cost}$"):
            bad.save(tmp_path / "bad.json")
    assert not (tmp_path / "bad.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version: expected 1, got 2"),
        ({"schema_version": True}, "schema_version: expected 1, got True"),
        ({"schema_version": ...}, "schema_version: expected 1, got none"),
        ({"batches": ...}, "keys: expected schema_version, rule, batches, costs_ms, plain_ms, draft_ms, fingerprint, "
                           "got none named batches"),
        ({"extra": 1}, "keys: expected schema_version, rule, batches, costs_ms, plain_ms, draft_ms, fingerprint, "
                       "got extra"),
        ({"batches": [1, 8.0]}, "batches: expected an int from 1 to 16777216, got 8.0"),
        ({"batches": "18"}, "batches: expected a list, got '18'"),
        ({"costs_ms": {}}, "costs_ms: expected a list, got {}"),
        ({"costs_ms": [[1, 2, 3], 4]}, "costs_ms: expected a list, got 4"),
        ({"costs_ms": [[1, 2, 3], [1, "2", 3]]}, "costs_ms: expected a number, got '2'"),
        ({"plain_ms": [1, None]}, "plain_ms: expected a number, got None"),
        ({"draft_ms": 3}, "draft_ms: expected a list, got 3"),
        ({"rule": None}, "rule: expected an object, got None"),
        ({"rule": {"rule": ["paper"]}}, "rule: expected one of paper, angelslim, tokens, got ['paper']"),
        ({"rule": {"rule": "paper", "ratios": [0.5]}},
         "rule: expected rule, ratios, draft_len, got none named draft_len"),
        ({"rule": {"rule": "tokens", "counts": [1, 2, 3], "draft_len": 7}},
         "rule: expected rule, counts, got draft_len"),
        ({"rule": {"rule": "tokens", "counts": [1, 2, "3"]}}, "counts: expected an int from 1 to 2147483647, got '3'"),
        ({"fingerprint": "H20"}, "fingerprint: expected an object or null, got 'H20'"),
        ({"fingerprint": {"device": "H20"}}, "fingerprint: expected device, model, engine, dtype, parallelism, "
                                             "got none named model, engine, dtype, parallelism"),
        ({"fingerprint": dict.fromkeys(("device", "model", "engine", "dtype", "parallelism"), 1)},
         "device: expected a str, got 1"),
    ],
)  # fmt: skip
def test_errors_name_file_and_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    TABLE.save(path := tmp_path / "costs.json")
    content = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        CostTable.load(path)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("old", "new"), [("3.25", "NaN"), ("3.25", "Infinity"), ("3.25", "1e999"), ("[", ""), ("{", "[{")]
)
def test_what_is_no_json(old: str, new: str, tmp_path: Path) -> None:
    TABLE.save(path := tmp_path / "costs.json")
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"^{path}: (expected JSON, got|costs_ms: expected finite numbers, got)"):
        CostTable.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=rf"^{path}: expected a JSON object, got list$"):
        CostTable.load(path)


def test_fingerprint_must_be_the_expected_one(tmp_path: Path) -> None:
    TABLE.save(path := tmp_path / "costs.json")
    other = replace(HERE, device="H800", dtype="float8")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        CostTable.load(path, expect=other)
    assert str(error.value) == (
        f"{path}: fingerprint: expected device 'H800', got 'H20'; expected dtype 'float8', got 'bfloat16'"
    )
    replace(TABLE, fingerprint=None).save(path)
    with pytest.raises(ValueError, match=rf"^{path}: fingerprint: expected Fingerprint\(device='H20', .*, got none$"):
        CostTable.load(path, expect=HERE)


def test_fingerprint_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H20")
    assert Fingerprint.here("m", "e", "float16") == Fingerprint("NVIDIA H20", "m", "e", "float16", "tp1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert Fingerprint.here("m", "e", "float16", "tp2").device.endswith(", 7 threads")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "expected JSON, got"), ('{"costs_ms": [[1]]}', "schema_version: expected 1, got none")],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "nasty.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{message}"):
        CostTable.load(path)


def test_numbers_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match=r"^costs_ms: expected a number that a float holds, got one of more digits$"):
        CostTable((1,), ((10**400,),), TokenCounts((1,)))
    with pytest.raises(ValueError, match=r"^plain_ms: expected finite values above 0, got \[0\.0\]$"):
        CostTable((1,), ((1.0,),), TokenCounts((1,)), plain_ms=(0.0,))
