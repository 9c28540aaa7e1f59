"""The baseline of the benchmark computes the same thing, and the benchmark reports only what was verified."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dcut_kernels
from dcut_kernels import _load
from microbench import eager, run
from microbench.cases import BENCH, Case, make
from python_tests.compare import tensor_difference

needs_library = pytest.mark.skipif(_load.missing("cpu") is not None, reason="nothing to time without the library")
NEAR = 1e-5  # relative distance below which float32 and the exact decision may part


def is_clear(case: Case) -> bool:
    """Whether no bucket ends between nearly equal scores and no two utilities are nearly equal, in float64."""
    batch, drafts = case.batch, case.batch * case.draft_len
    scores = case.inputs["confidence"].double().cumprod(1).flatten().sort(descending=True).values.tolist()
    totals = [min(max(budget, batch), batch + drafts) for budget in case.inputs["budgets"].tolist()]
    costs = case.inputs["costs"].tolist()
    gains = [batch + sum(scores[: total - batch]) for total in totals]
    first, *others = sorted((gain / cost for gain, cost in zip(gains, costs, strict=True)), reverse=True)
    ends = [total - batch for total in totals if batch < total < batch + drafts]
    clear = all(not math.isclose(scores[end - 1], scores[end], rel_tol=NEAR) for end in ends)
    return clear and not any(math.isclose(first, other, rel_tol=NEAR) for other in others)


def random(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    batch, draft_len, buckets = (int(rng.integers(1, top)) for top in (40, 20, 9))
    confidence = rng.beta(0.7, 0.7, (batch, draft_len)).astype(np.float32)
    budgets = rng.integers(1, batch * (draft_len + 1) + 5, buckets)
    return make(f"random-{seed}", torch.from_numpy(confidence), budgets, rng.uniform(0.5, 2, buckets), seed=seed)


CASES = [*BENCH, *map(random, range(40))]


@pytest.mark.parametrize("case", [case for case in CASES if is_clear(case)], ids=str)
def test_eager_equals_the_operator(case: Case) -> None:
    got, want = eager.select_and_pack(**case.inputs), dcut_kernels.select_and_pack(**case.inputs)
    for name in want._fields[:-1]:
        difference = tensor_difference(name, getattr(got, name), getattr(want, name))
        assert difference is None, difference
    assert torch.allclose(got.gains.double(), want.gains.double() / 2**30, rtol=1e-4)


def test_most_cases_are_clear() -> None:
    assert sum(map(is_clear, CASES)) >= 0.8 * len(CASES)


def test_equal_scores_rank_by_position_then_request() -> None:
    case = make("ties", [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [6], [1.0])
    assert eager.select_and_pack(**case.inputs).keep_lens.tolist() == [2, 2]


@needs_library
def test_benchmark_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "BENCH", [case for case in BENCH if case.batch in (1, 8) and case.draft_len == 7])
    assert run.main(["--quick", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["verified"] is True
    assert results["isa"] == _load.cpu_isa()
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["batch"], row["draft_len"]) for row in rows] == [("1", "7"), ("8", "7")]
    for row, saved in zip(results["rows"], rows, strict=True):
        assert {name: str(value) for name, value in row.items()} == saved
        assert 0 < row["out_us"] < 1e6
    met = sum(entry["met"] for entry in results["targets"])
    assert f"{met} of 3 targets met" in capsys.readouterr().out


@needs_library
@pytest.mark.parametrize("body", ["assert False", "pytest.skip('later')", None])
def test_benchmark_refuses_on_red(body: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / f"test_{tmp_path.name}.py"  # a module name of its own
    case = "@pytest.mark.parametrize('name', ['cpu-{}-1x7'])\ndef test_equals_reference(name):\n    {}\n"
    gate.write_text("import pytest\n" + (case.format(_load.cpu_isa(), body) if body else ""))
    monkeypatch.setattr(run, "GATE", gate)
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="no report: of 18 agreement tests 0 passed"):
        run.main(["--out", str(tmp_path)])


def entries(out: float, allocating: float, eager_: float, threads: float) -> list[run.Row]:
    times = {"out": out, "allocating": allocating, "eager": eager_, "eager_threads": threads}
    return [
        {"batch": batch, "draft_len": 15, "way": way, "turn": turn, "us": us * (1 + turn)}
        for turn in range(3)
        for batch in (64, 1024)
        for way, us in times.items()
    ]


def test_ratios_take_the_faster_baseline() -> None:
    row = run.summarize(entries(2, 4, 60, 50))[0]
    assert (row["out_us"], row["baseline"]) == (4, "eager_threads")
    assert (row["out_ratio"], row["out_ratio_min"], row["out_ratio_max"], row["allocating_ratio"]) == (25, 25, 25, 12.5)


@pytest.mark.parametrize(("eager_us", "missed"), [(60, 0), (29, 1), (23, 2), (15, 4)])
def test_targets(eager_us: float, missed: int) -> None:
    """Of 12x and 15x into reused buffers and 8x twice into new ones; growth is 1."""
    targets = run.check(run.summarize(entries(2, 2.5, eager_us, 99)))
    assert len(targets) == 5
    assert sum(not entry["met"] for entry in targets) == missed
    assert [entry["measured"] for entry in targets if "growth" in entry["target"]] == [1]
