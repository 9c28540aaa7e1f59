"""``python -m dcut_kernels cost`` shows, draws, checks and merges tables."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

from dcut_kernels.__main__ import main
from dcut_kernels.cost import CostTable, Fingerprint, PaperRatios, TokenCounts
from python_tests.published_costs import paper_table

MARK = Fingerprint("H20", "m", "e", "t")
GOOD = CostTable((4, 16), ((1.0, 1.5), (2.0, 3.25)), PaperRatios((0.5, 1.0), 15), (0.875, 1.75), None, MARK)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """Paths of a good, an inverted, a flat and a wide table."""
    tables = {
        "good": GOOD,
        "inverted": paper_table("h20"),
        "flat": replace(GOOD, costs_ms=((1.0, 1.5), (2.0, 2.01))),
        "wide": CostTable((32,), (tuple(range(1, 257)),), TokenCounts(tuple(range(1, 257)))),
    }
    for name, table in tables.items():
        table.save(tmp_path / f"{name}.json")
    return {name: str(tmp_path / f"{name}.json") for name in tables}


def status(*arguments: str) -> int | str | None:
    try:
        main(["cost", *arguments])
    except SystemExit as end:
        return end.code
    return 0


def test_show(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status("show", saved["good"], saved["inverted"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "good.json",
        "inverted.json",
        "3.250 ms, K 256",
        "1.750 ms",
        "133.914 ms, K 1024",
        "H20, m, e, t, tp1",
    ):
        assert words in shown


def test_show_marks_disabled_buckets_and_grows_downwards(
    tmp_path: Path, saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    replace(GOOD, costs_ms=((math.inf, 1.5), (2.0, 3.0))).save(tmp_path / "off.json")
    assert status("show", str(tmp_path / "off.json"), saved["wide"]) == 0
    shown = capsys.readouterr().out
    assert "off, K 32" in shown
    assert "256.000 ms, K 256" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_plot(saved: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "costs.png"
    assert status("plot", saved["good"], saved["wide"], "--out", str(out)) == 0
    height, width, _ = matplotlib.image.imread(out).shape
    assert width > 2 * height


def test_batches_without_a_cost_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row may have no usable bucket; a plot of nothing but such rows is refused."""
    path, out = str(tmp_path / "off.json"), tmp_path / "costs.png"
    no_cost = f"{path}: no bucket that holds the bonus tokens has a cost at"
    off = (math.inf, 0.0)
    for command in (("show", path), ("plot", path, "--out", str(out))):
        replace(GOOD, costs_ms=(off, (2.0, 3.25))).save(path)
        assert status(*command) == 0
        assert capsys.readouterr().err == f"{no_cost} batch 4\n"
    out.unlink()
    for plain_ms in (None, GOOD.plain_ms):
        replace(GOOD, costs_ms=(off, (-1.0, math.inf)), plain_ms=plain_ms).save(path)
        assert status("show", path) == 0
        printed = capsys.readouterr()
        assert "off, K 256" in printed.out
        assert printed.err == f"{no_cost} batches 4, 16\n"
        assert status("plot", path, "--out", str(out)) == 2
        message = "off: expected a bucket with a cost above 0 and below inf to draw, got none at any batch"
        assert capsys.readouterr().err.endswith(f"error: argument TABLE: {message}\n")
        assert not out.exists()


def test_check(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status("check", saved["good"]) == 0
    assert capsys.readouterr().out == f"{saved['good']}: no problems in 2 batches of 2 buckets\n"
    assert status("check", saved["good"], saved["inverted"], saved["flat"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"{saved['inverted']}: inverted: At batch 1 a step of 8 tokens costs 7.157 ms")
    assert lines[2].startswith(f"{saved['flat']}: flat: The largest bucket costs less than 5% more")
    assert len(lines) == 3
    assert status("check", saved["flat"], "--allow-flat") == 0
    assert status("check", saved["inverted"], "--allow-flat") == 1


def test_merge(saved: dict[str, str], tmp_path: Path) -> None:
    other = replace(GOOD, batches=(2, 8))
    other.save(tmp_path / "other.json")
    out = tmp_path / "all.json"
    assert status("merge", saved["good"], str(tmp_path / "other.json"), "--out", str(out)) == 0
    assert CostTable.load(out).batches == (2, 4, 8, 16)


def test_errors_name_argument_and_file(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, missing, folder = tmp_path / "broken.json", tmp_path / "missing.json", tmp_path / "none" / "out"
    not_written = f"argument --out: expected a file to write, got {folder} (No such file or directory)"
    broken.write_text("{")
    for arguments, message in (
        (("check", str(missing)), f"argument TABLE: expected a cost table, got {missing} (No such file or directory)"),
        (("show", saved["good"], str(broken)), f"argument TABLE: {broken}: expected JSON, got"),
        (("show", saved["good"], saved["good"]), f"argument TABLE: expected each file once, got {saved['good']} twice"),
        (("plot", saved["good"]), "the following arguments are required: --out"),
        (("plot", saved["good"], "--out", f"{folder}.png"), not_written.replace(str(folder), f"{folder}.png")),
        (("plot", saved["good"], "--out", "x.pdf"), "argument --out: expected a name that ends in .png, got x.pdf"),
        (("merge", saved["good"], saved["flat"], "--out", str(missing)),
         "argument TABLE: tables: expected each batch in one table, got batch 4 in two "
         f"({saved['good']}, {saved['flat']})"),
        (("merge", saved["good"], "--out", str(folder)), not_written),
        ((), "the following arguments are required: command"),
    ):  # fmt: skip
        assert status(*arguments) == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert not missing.exists()


@pytest.mark.parametrize(("command", "module"), [("show", "rich"), ("plot", "matplotlib")])
def test_optional_packages_are_named(
    command: str, module: str, saved: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    options = ["--out", str(tmp_path / "x.png")] if command == "plot" else []
    assert status(command, saved["good"], *options) == 1
    assert (
        capsys.readouterr().err == f"error: {command}: expected {module}, got none: pip install 'dcut_kernels[demo]'\n"
    )
