"""The live demo shows what the engine did: its numbers are right, and a wrong text is noticed."""

import ast
import json
import re
import sys

import pytest
import torch
from rich.console import Console

import dcut_kernels
from dcut_kernels.__main__ import LIVE, PAIR_FILES, main
from dcut_kernels.cost import CostTable
from dcut_kernels.demo import run as replay
from dcut_kernels.demo.live import measure, report
from dcut_kernels.demo.live import run as live
from dcut_kernels.engine import Engine
from dcut_kernels.engine.policies import FORMS

PAIR = LIVE["pair"]
PARTS = ("draft", "select", "verify", "rest")
FILES = ", ".join(PAIR_FILES)
OPTIONS = ("--pair", PAIR, "--prompts", 5, "--tokens", 20, "--rounds", 2)
POLICIES = ("uniform-3", "ratio-0.25", "dcut")


def run_cli(*arguments):
    main(["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run: its directory and what it printed."""
    out = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        console = Console(width=110, highlight=False, file=(out / "printed.txt").open("w", encoding="utf-8"))
        patch.setattr(live, "make_console", lambda: console)
        run_cli(*OPTIONS, "--concurrency", 1, 4, "--policy", *POLICIES, "--out", out)
        console.file.close()
    return out, (out / "printed.txt").read_text(encoding="utf-8")


def test_run_writes_what_it_promises(finished):
    out, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert summary["arguments"] == {
        "concurrency": [1, 4], "prompts": 5, "policy": ["ar", "full", *POLICIES], "tokens": 20, "rounds": 2,
        "pair": str(PAIR), "out": str(out),
    }  # fmt: skip
    assert summary["environment"]["dcut_kernels"] == dcut_kernels.__version__
    assert summary["environment"]["threads"] == torch.get_num_threads()
    expected = [(n, policy) for n in (1, 4) for policy in ("ar", "full", *POLICIES)]
    assert [(row["concurrency"], row["policy"]) for row in summary["rows"]] == expected
    costs = CostTable.load(out / "step_costs.json")
    assert costs.batches == (1, 2, 4)
    assert costs.rule.budgets(2) == (2, 3, 4, 5, 6, 7, *range(8, 33, 2))
    for name in ("speedup", "step_time", "kept_depth"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_run(finished):
    out, printed = finished
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert max(map(len, printed.split("vs ar, vs full:")[0].splitlines())) <= 110
    pair = live.load(PAIR)
    engines = {n: Engine(pair.target, pair.drafter, "ar", max_batch=n) for n in (1, 4)}
    texts = {n: engine.generate(pair.prompts[:5], 20) for n, engine in engines.items()}
    for mine in texts.values():
        mine[:] = [text[:most] for text, most in zip(mine, measure.lengths(20, 5), strict=True)]
    for mine in rows:
        assert mine["identical"]
        assert mine["ties"] or mine["texts_sha256"] == report.texts_sha256(
            texts[mine["concurrency"]][: mine["prompts"]]
        )
        assert mine["accepted_per_verified"] == pytest.approx(mine["accepted"] / mine["verified"])
        assert bool(mine["bucket_steps"]) == (mine["policy"] == "dcut")
        assert set(mine["milliseconds"]) == set(PARTS)
        assert all(value > 0 for value in mine["milliseconds"].values())
        cells = (f"{mine['speedup_over_ar']:.2f}x", f"{mine['speedup']:.2f}x", f"{mine['mat']:.2f}")
        cells += (f"{mine['verified']:.1f}", f"{mine['accepted_per_verified']:.3f}")
        assert re.search(" +".join([mine["policy"], *map(re.escape, cells)]) + ".* yes", printed)
    named = {(mine["concurrency"], mine["policy"]): mine for mine in rows}
    for n in (1, 4):
        assert (named[n, "ar"]["speedup_over_ar"], named[n, "full"]["speedup"]) == (1, 1)
        assert named[n, "ar"]["verified"] <= named[n, "uniform-3"]["verified"] < named[n, "full"]["verified"]
        assert sum(named[n, "dcut"]["bucket_steps"]) > 0
    assert "1 request at a time, 5 texts of 10 to 20 tokens, 2 rounds" in printed


def test_wrong_text_is_noticed(tmp_path, monkeypatch, capsys):
    right = Engine.step

    def wrong(self):
        step = right(self)
        for request in step.requests:
            if self.policy.name == "uniform-3" and request.seed == 1 and request.finished:
                request.output[2] += 1
        return step

    monkeypatch.setattr(Engine, "step", wrong)
    options = ("--concurrency", 2, "--prompts", 2, "--tokens", 4, "--rounds", 1, "--policy", "uniform-3")
    with pytest.raises(SystemExit) as error:
        run_cli("--pair", PAIR, *options, "--out", tmp_path)
    assert error.value.code == 1
    printed = capsys.readouterr()
    assert printed.err == "error: generated texts differ from plain greedy decoding\n"
    assert re.search(r"uniform-3 .* NO \(1\) *\n", printed.out)
    found = {row["policy"]: row["identical"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    assert found == {"ar": True, "full": True, "uniform-3": False}
    assert not (tmp_path / "kept_depth.png").exists()


def test_interrupted_runs_leave_the_costs(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "take_turns", interrupted)
    with pytest.raises(SystemExit) as error:
        run_cli("--pair", PAIR, "--concurrency", 1, "--prompts", 1, "--tokens", 4, "--out", tmp_path)
    assert error.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert CostTable.load(tmp_path / "step_costs.json").batches == (1,)


@pytest.mark.parametrize("policy", ["dcut", "uniform-2", "ar"])
def test_stream_reassembles_to_the_text(policy, monkeypatch, capsys):
    generate, generated = Engine.generate, []

    def recorded(self, *args, **options):
        generated.extend(generate(self, *args, **options))
        return generated

    monkeypatch.setattr(Engine, "generate", recorded)
    monkeypatch.setenv("COLUMNS", "5000")
    monkeypatch.setenv("NO_COLOR", "1")
    prompt = "def main(args):\n    "
    run_cli("--pair", PAIR, "--prompt", prompt, "--tokens", 20, *(["--policy", policy] if policy != "dcut" else []))
    (text,), printed = generated, capsys.readouterr().out
    assert "\x1b" not in printed
    lines = re.findall(r"^ *\d+ +(\d+) / +(\d+) / +(\d+)  (.*)$", printed, re.MULTILINE)
    quoted = r"""([+=x.])('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    found = [[(mark, ast.literal_eval(value)) for mark, value in re.findall(quoted, line[3])] for line in lines]
    decoded = live.load(PAIR).tokenizer.decode(text)
    assert "".join(value for line in found for mark, value in line if mark in "+=") == decoded
    assert f"{len(text)} tokens in {len(lines)} steps" in printed
    assert printed.endswith(prompt + decoded + "\n")
    for (accepted, kept, drafted, _), line in zip(lines, found, strict=True):
        marks = "".join(mark for mark, _ in line)
        assert ("x" in marks) == (accepted < kept)
        assert ("." in marks) == (int(kept) < int(drafted))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5"], "argument --steps: expected only with --replay, got 5"),
        (["--trace", "tiny_a"], "argument --trace: expected only with --replay, got tiny_a"),
        (["--table", "h20", "h800"], "argument --table: expected only with --replay, got h20 h800"),
        (["--show", "2"], "argument --show: expected only with --replay, got 2"),
        (["--replay", "--prompts", "2"], "argument --prompts: expected only without --replay, got 2"),
        (["--replay", "--policy", "ar", "full"], "argument --policy: expected only without --replay, got ar full"),
        (["--replay", "--tokens", "2"], "argument --tokens: expected only without --replay, got 2"),
        (["--replay", "--rounds", "2"], "argument --rounds: expected only without --replay, got 2"),
        (["--replay", "--prompt", "x"], "argument --prompt: expected only without --replay, got x"),
        (["--replay", "--pair", "x"], "argument --pair: expected only without --replay, got x"),
        (["--replay", "--concurrency", "1", "8"], "argument --concurrency: expected one number with --replay, got 1 8"),
        (["--prompt", "x", "--concurrency", "1"], "argument --concurrency: expected only without --prompt, got 1"),
        (["--prompt", "x", "--prompts", "1"], "argument --prompts: expected only without --prompt, got 1"),
        (["--prompt", "x", "--rounds", "1"], "argument --rounds: expected only without --prompt, got 1"),
        (["--prompt", "x", "--out", "y"], "argument --out: expected only without --prompt, got y"),
        (
            ["--prompt", "x", "--policy", "ar", "full"],
            "argument --policy: expected one policy with --prompt, got ar full",
        ),
        (["--prompt", "x", "--tokens", "1025"], "argument --tokens: expected 2 to 1024, got 1025"),
        (["--tokens", "1"], "argument --tokens: expected 2 to 1024, got 1"),
        (["--rounds", "0"], "argument --rounds: expected 1 to 100, got 0"),
        (["--prompts", "257"], "argument --prompts: expected 1 to 256, got 257"),
        (["--concurrency", "8", "0"], "argument --concurrency: expected 1 to 256, got 8 0"),
        (["--prompts", "8"], "argument --prompts: expected at least 64, the largest --concurrency, got 8"),
        (
            ["--policy", "uniform", "--pair", PAIR],
            f"argument --policy: expected {FORMS}, got 'uniform'",
        ),
        (
            ["--pair", "nowhere"],
            f"argument --pair: expected a folder with {FILES}, got nowhere without target/config.json; give --pair "
            "DIR, or --replay to see recorded drafts",
        ),
        (
            ["--pair", PAIR, "--out", __file__],
            f"argument --out: expected a directory to write to, got {__file__} (File exists)",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(live, "run", lambda args, error: pytest.fail("ran"))
    monkeypatch.setattr(replay, "run", lambda args: pytest.fail("ran"))
    with pytest.raises(SystemExit) as error:
        run_cli(*arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


@pytest.mark.parametrize(("prompt", "message"), [("", "1 to 1937 tokens, got 0"), ("x\udcff", "text, got 'x\\udcff'")])
def test_prompts_that_are_none(prompt, message, capsys):
    with pytest.raises(SystemExit) as error:
        run_cli("--prompt", prompt, "--pair", PAIR)
    assert error.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument --prompt: expected {message}\n")


@pytest.mark.parametrize("options", [["--concurrency", 1], ["--prompt", "x"]])
def test_more_drafts_than_the_pair_has(options, monkeypatch, capsys, tmp_path):
    for name in ("costs_with_progress", "Engine"):
        monkeypatch.setattr(live, name, lambda *_, **__: pytest.fail("ran"))
    where = [] if "--prompt" in options else ["--out", tmp_path]
    with pytest.raises(SystemExit) as error:
        run_cli("--pair", PAIR, *options, *where, "--policy", "uniform-16")
    assert error.value.code == 2
    message = "argument --policy: expected uniform-K with K up to 15, the drafts of a row, got 'uniform-16'"
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_more_prompts_than_the_pair_has(monkeypatch, capsys, tmp_path):
    pair = live.load(PAIR)
    monkeypatch.setattr(live, "load", lambda folder: pair._replace(prompts=pair.prompts[:3]))
    options = ("--concurrency", 1, "--prompts", 4, "--tokens", 2, "--rounds", 1, "--policy", "ar")
    with pytest.raises(SystemExit):
        run_cli("--pair", PAIR, *options, "--out", tmp_path)
    assert "argument --prompts: expected at most 3 with this pair, got 4" in capsys.readouterr().err


def test_prompts_by_default(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(live, "run", lambda args, error: seen.append(args) or True)
    for concurrency in ([8], [8, 100, 8]):
        run_cli("--pair", PAIR, "--concurrency", *concurrency, "--policy", "dcut", "full", "--out", tmp_path)
    found = [(args.prompts, args.concurrency, args.policy) for args in seen]
    assert found == [(64, [8], ["ar", "full", "dcut"]), (100, [8, 100], ["ar", "full", "dcut"])]


@pytest.mark.parametrize("module", ["tokenizers", "safetensors"])
def test_missing_extra_names_the_fix(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as error:
        run_cli("--pair", PAIR)
    assert error.value.code == 1
    assert capsys.readouterr().err == f"error: the demo needs {module}: pip install 'dcut_kernels[demo]'\n"
