"""The demo replays what was recorded, and every number that it prints is right."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

import dcut_kernels
from dcut_kernels.__main__ import main
from dcut_kernels.demo import draw, policies, recordings, report, tables
from dcut_kernels.demo.policies import Policy
from dcut_kernels.demo.recordings import ClosedLoop, RecordedTrace
from dcut_kernels.demo.replay import Replay, acceptance_curve, compare_texts, replay

H20 = tables.cost_table("h20", 64)
FULL = Policy("full depth", 1.0)
PUBLISHED = {name: tables.sources()["recordings"][f"trace_{name}"]["published"] for name in tables.TRACES}


def run_cli(*arguments):
    main(["demo", "--replay", *map(str, arguments)])


@pytest.mark.parametrize("trace", tables.TRACES)
def test_full_depth_reproduces_a_recorded_trace(trace):
    result = replay(RecordedTrace(trace, 64), FULL, H20, 60)
    recorded = recordings.load(f"trace_{trace}")["accepted"]
    np.testing.assert_array_equal(result.accepted, recorded)
    np.testing.assert_array_equal(result.acceptable, recorded)
    np.testing.assert_array_equal(result.verified, np.full(60, 1024))
    assert report.policy_row(result, result, H20)["mat"] == pytest.approx(PUBLISHED[trace]["mat"], abs=0.005)


@pytest.mark.parametrize("trace", tables.TRACES)
def test_published_share_of_accepted_tokens(trace):
    curve = acceptance_curve(replay(RecordedTrace(trace, 64), FULL, H20, 60))
    for uniform, published in ((False, "top_k_share"), (True, "uniform_share")):
        for ratio, share in zip(policies.RATIOS, PUBLISHED[trace][published], strict=True):
            result = replay(RecordedTrace(trace, 64), Policy("fixed", ratio, uniform), H20, 60)
            np.testing.assert_array_equal(result.verified, np.full(60, 1024 * ratio))
            np.testing.assert_array_equal(result.accepted, np.minimum(result.keep_lens, result.acceptable))
            assert report.kept_share(result) == pytest.approx(share, abs=0.0005)
            on_curve = (curve.uniform if uniform else curve.top_k)[curve.verified == 1024 * ratio]
            assert on_curve == pytest.approx(result.accepted.sum(axis=1).mean())


@pytest.mark.parametrize("trace", tables.TRACES)
def test_published_buckets_of_dcut(trace):
    result = replay(RecordedTrace(trace, 64), Policy("D-cut", table="h20"), H20, 60)
    assert np.bincount(result.bucket, minlength=4).tolist() == PUBLISHED[trace]["h20_buckets"]


@pytest.mark.parametrize("batch", [4, 64])
def test_every_policy_generates_the_greedy_text(batch):
    costs = tables.cost_table("h20", batch)
    data = recordings.load("anchors_tiny_a")
    prompt = int(data["prompt_len"])
    for policy in policies.all_policies([costs], 15):
        source = ClosedLoop(batch)
        result = replay(source, policy, costs, 40)
        assert compare_texts(result.texts, source) == (len(result.texts), len(result.texts))
        assert len(result.texts) > batch  # some finished and were replaced
        running = set(result.steps[-1].request.tolist())
        for request, tokens in result.texts.items():
            text = request % 64
            assert tokens == data["token_ids"][text, prompt : prompt + len(tokens)].tolist()
            assert len(tokens) >= 64 or request in running
        recorded = [data["accepted"][step.request % 64, step.seq_lens - prompt] for step in result.steps]
        np.testing.assert_array_equal(result.acceptable, recorded)
        np.testing.assert_array_equal(result.accepted, np.minimum(recorded, result.keep_lens))


def test_a_wrong_text_is_noticed():
    source = ClosedLoop(4)
    texts = replay(source, FULL, H20, 2).texts
    texts[2][-1] += 1
    assert compare_texts(texts, source) == (4, 3)


def test_uniform_depth_keeps_the_same_depth_everywhere():
    for policy in policies.all_policies([H20], 15)[1:4]:
        result = replay(ClosedLoop(64), policy, H20, 3)
        depth = int(policy.name.removeprefix("uniform depth "))
        np.testing.assert_array_equal(result.keep_lens, np.full((3, 64), depth))
        np.testing.assert_array_equal(result.verified, np.full(3, 64 * (depth + 1)))


@pytest.mark.parametrize(("batch", "expected"), [(1, [4, 8, 12, 16]), (64, [256, 512, 768, 1024])])
def test_budgets(batch, expected):
    assert [policies.paper_budget(ratio, batch, 15) for ratio in H20.ratios] == expected
    assert policies.paper_budget(0.01, batch, 15) == (1 if batch == 1 else 64)
    assert policies.paper_budget(0.3, 1, 15) == 5


def hand_made(policy, accepted, verified, bucket, seconds):
    accepted = np.array(accepted)
    return Replay(
        policy=policy,
        budgets=np.array([2, 4]),
        steps=[],
        keep_lens=accepted,
        accepted=accepted,
        acceptable=accepted + 1,
        verified=np.array(verified),
        bucket=np.array(bucket),
        op_seconds=np.array(seconds),
        texts={},
    )


def test_row_of_the_table_by_hand():
    costs = tables.CostTable("toy", "toy", "none", [0.5, 1.0], [10.0, 30.0])
    full = hand_made(FULL, [[1, 1], [0, 2]], [4, 4], [1, 1], [1e-6, 1e-6])
    some = hand_made(Policy("D-cut", table="toy"), [[1, 0], [0, 1]], [2, 4], [0, 1], [2e-6, 4e-6])
    row = report.policy_row(some, full, costs)
    assert row["verified_per_step"] == 3
    assert row["accepted_per_step"] == 1
    assert row["tokens_per_step"] == 3
    assert row["tokens_per_verified"] == 1
    assert row["mat"] == 1.5
    assert row["kept_share"] == pytest.approx(2 / 6)
    assert row["step_ms"] == 20
    assert row["tokens_per_second"] == pytest.approx(6 / 0.040)
    assert row["speedup"] == pytest.approx((6 / 40) / (8 / 60))
    assert row["bucket_steps"] == [1, 1]
    assert row["op_microseconds"] == pytest.approx(3)


def test_summary_and_plots(tmp_path, capsys):
    run_cli("--steps", 3, "--concurrency", 8, "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert summary["arguments"] == {
        "concurrency": 8,
        "steps": 3,
        "trace": None,
        "table": ["h20", "h800"],
        "show": None,
        "out": str(tmp_path),
    }
    assert summary["environment"]["dcut_kernels"] == dcut_kernels.__version__
    assert summary["environment"]["torch"] == torch.__version__
    assert summary["environment"]["backend"] in ("cpu", "reference")
    assert summary["replay"]["recording"] == "anchors_tiny_a"
    assert summary["replay"]["exact"] is True
    assert summary["replay"]["texts_equal_to_greedy"] == summary["replay"]["texts_compared"] >= 9 * 8
    names = ["full depth", "uniform depth 3", "uniform depth 7", "uniform depth 11"]
    names += ["ratio 0.25", "ratio 0.5", "ratio 0.75", "D-cut"]
    assert [(r["table"], r["policy"]) for r in summary["rows"]] == [(t, n) for t in ("h20", "h800") for n in names]
    printed = capsys.readouterr().out
    for row in summary["rows"]:
        costs = tables.cost_table(row["table"], 8).costs
        full = next(r for r in summary["rows"] if r["policy"] == "full depth" and r["table"] == row["table"])
        assert sum(row["bucket_steps"]) == row["steps"] == 3
        assert row["tokens_per_step"] == pytest.approx(row["accepted_per_step"] + 8)
        assert row["tokens_per_verified"] == pytest.approx(row["tokens_per_step"] / row["verified_per_step"])
        assert row["mat"] == pytest.approx(row["tokens_per_step"] / 8)
        assert row["step_ms"] == pytest.approx(np.dot(costs, row["bucket_steps"]) / 3)
        speed, full_speed = (r["tokens_per_step"] / r["step_ms"] for r in (row, full))
        assert row["speedup"] == pytest.approx(speed / full_speed)
        assert 0 < row["op_microseconds"] < 1e6
        shown = (
            f"{row['accepted_per_step']:.1f} +{row['tokens_per_verified']:.3f} +{row['mat']:.2f} +{row['speedup']:.2f}x"
        )
        assert re.search(rf"{re.escape(row['policy'])} +{row['verified_per_step']:.0f} +{shown}", printed)
    assert len(summary["acceptance_curve"]["verified_per_step"]) == 15
    for name in ("speedup", "kept_depth", "accepted_vs_verified"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_missing_cost_row_is_said(tmp_path, capsys):
    run_cli("--steps", 2, "--concurrency", 4, "--out", tmp_path)
    assert (
        "h800 is left out: no cost was published for 4 requests, only for 1, 8, 16, 32, 64." in capsys.readouterr().out
    )
    assert {row["table"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]} == {"h20"}


def test_output_says_which_replay_is_exact(tmp_path, capsys):
    run_cli("--steps", 1, "--concurrency", 1, "--out", tmp_path)
    assert "Exact replay" in capsys.readouterr().out
    run_cli("--steps", 1, "--concurrency", 1, "--trace", "tiny_a", "--out", tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Exact for full depth; the other policies are applied to the same steps" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["replay"]["exact"] is False


@pytest.mark.parametrize("columns", [80, 120])
def test_show_is_readable_without_color(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    run_cli("--steps", 4, "--concurrency", 8, "--trace", "tiny_a", "--show", 3, "--out", tmp_path)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "= bonus  + kept, accepted  x kept, rejected  o pruned but acceptable  . pruned" in printed
    result = replay(RecordedTrace("tiny_a", 8), Policy("D-cut", table="h20"), tables.cost_table("h20", 8), 4)
    step = result.steps[2]
    lines = [line for line in printed.splitlines() if re.match(r" +\d+ .*=.*[▁▂▃▄▅▆▇█]{15}$", line)]
    assert len(lines) == 8
    for row, line in enumerate(lines):
        kept, right = result.keep_lens[2, row], result.acceptable[2, row]
        marks = "".join(
            "+" if k < min(kept, right) else "x" if k < kept else "o" if k < right else "." for k in range(15)
        )
        assert re.sub(r"[^=+xo.]", "", line) == "=" + marks
        ids = [int(token) for token in re.findall(r"(\d+)[=+xo.]", line)]
        assert ids == ([step.bonus_ids[row], *step.draft_ids[row]] if columns == 120 else [])
    assert ("token ids need" in printed) == (columns == 80)


def test_show_colors_every_kind(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = replay(RecordedTrace("tiny_a", 64), Policy("D-cut", table="h20"), H20, 4)
    console = Console(width=120, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as capture:
        draw.draw_step(console, result, 4, H20)
    drawn = capture.get()
    codes = {"=": "1;36", "+": "32", "x": "31", "o": "1;33", ".": "90"}
    for mark, code in codes.items():
        assert re.search(rf"\x1b\[{code}m( *\d+{re.escape(mark)})+\x1b\[0m", drawn), mark
    assert not re.search(r"\x1b\[32m[^\x1b]*[x.o]", drawn.split("confidence")[-1])


def test_confidence_bar():
    assert draw.confidence_bar([0, 0.124, 0.125, 0.9, 1], ascii_only=False) == "▁▁▂██"
    assert draw.confidence_bar([0, 0.124, 0.125, 0.9, 1], ascii_only=True) == "01199"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "5"], r"argument --concurrency: invalid choice: '?5'? \(choose from '?1'?, '?4'?, '?8'?,"),
        (["--steps", "0"], "argument --steps: expected 1 to 10000, got 0"),
        (["--trace", "tiny_a", "--steps", "61"], "argument --steps: expected 1 to 60 with --trace, got 61"),
        (["--show", "61"], "argument --show: expected a step from 1 to 60, got 61"),
        (["--show", "0"], "argument --show: expected a step from 1 to 60, got 0"),
        (["--trace", "nope"], "argument --trace: invalid choice: 'nope'"),
        (["--table", "h100"], "argument --table: invalid choice: 'h100'"),
        (
            ["--table", "h800", "--concurrency", "4"],
            "argument --concurrency: h800 has rows for 1, 8, 16, 32, 64; got 4",
        ),
        (["--out", "/proc"], r"argument --out: expected a directory to write to, got /proc \("),
        (["--out", __file__], r"argument --out: expected a directory to write to, got .*test_demo.py \(File exists\)"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        run_cli(*arguments)
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("module", ["numpy", "rich", "matplotlib"])
def test_missing_extra_names_the_fix(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as error:
        run_cli("--steps", "1")
    assert error.value.code == 1
    assert capsys.readouterr().err == f"error: the demo needs {module}: pip install 'dcut_kernels[demo]'\n"


def test_command_is_required(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "command" in capsys.readouterr().err
