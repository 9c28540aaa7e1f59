"""The GPU check where there is no GPU: its command line, and that no part costs another its results."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from dcut_kernels import VerifyBatch, backends
from dcut_kernels.ops import Backend
from microbench import eager, gpu_check
from microbench.cases import BENCH, Case
from microbench.gpu import graphs, sanitizer
from microbench.gpu.correctness import differences
from microbench.gpu.device import KERNEL_NODE
from microbench.gpu.record import Record
from microbench.gpu.report import report
from microbench.gpu.timing import goals, more_buckets, timed_cases
from microbench.gpu_check import PARTS, Part
from python_tests.compare import tensor_difference

needs_cpu = pytest.mark.skipif("cpu" not in backends.available(), reason="only the reference is built")
SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")
WRITE = """import sys
from pathlib import Path
from microbench.gpu.device import KERNEL_NODE
from microbench.gpu.record import Record
record = Record(Path(sys.argv[2]), {!r})
record["found"] = 1
"""


def part(name: str, code: str, seconds: int = 60) -> Part:
    """A part whose process writes its own entry and then does as told."""
    return Part(name, ("-c", WRITE.format(name) + code), seconds)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: nothing that these tests run touches it."""
    monkeypatch.setattr(gpu_check, "missing_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "machine", lambda: {"gpu": "none", "gpus": 0})


def script(*arguments: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # python3 is the one that runs this
    command = ["bash", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PATH": path})


def test_script_is_bash() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).returncode == 0
    assert SCRIPT.stat().st_mode & 0o111


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    done = script(str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: torch: expected a GPU that torch.cuda sees, got torch ")
    assert not (tmp_path / "out").exists()


def test_help_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--help"])
    assert ended.value.code == 0
    assert "{build,correctness,timing,nvrtc,sanitizer}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--stage", "speed"])
    assert ended.value.code == 2
    assert "invalid choice: 'speed'" in capsys.readouterr().err


def test_every_part_is_a_module() -> None:
    for each in PARTS:
        flag, module, *_ = each.command
        assert flag == "-m"
        assert callable(importlib.import_module(module).run)
    assert sum(each.seconds for each in PARTS) < 15 * 60


class Wrong(Backend):
    """Decides as the CPU does, but for one part or one entry of a result."""

    def __init__(self, wrong: str) -> None:
        super().__init__("wrong", "dcut_cpu")
        self.wrong = wrong

    def select_and_pack(self, *args: Any, **kwargs: Any) -> VerifyBatch:
        result = super().select_and_pack(*args, **kwargs)
        if self.wrong == ("out" if kwargs.get("out") else "new"):
            result.positions[-1] += 1
        elif self.wrong == "beyond" and kwargs.get("out"):
            result.gains._base[0] += 1
        return result

    def log_prefix_sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().log_prefix_sum(*args, **kwargs) + (self.wrong == "prefix")

    def segmented_topk(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().segmented_topk(*args, **kwargs) + (self.wrong == "depths")

    def bucket_argmax(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decision, gains = super().bucket_argmax(*args, **kwargs)
        return decision, gains + (self.wrong == "gains")


@needs_cpu
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("", None),
        ("new", "new positions[127]: "),
        ("out", "out positions[127]: "),
        ("beyond", "out gains: written beyond its ends"),
        ("prefix", "composed "),
        ("depths", "composed "),
        ("gains", "composed gains[0]: "),
    ],
)
def test_differences_are_found(wrong: str, found: str | None) -> None:
    case = next(case for case in BENCH if case.name == "8x15")
    first = next(differences(case, Wrong(wrong), backends.get("cpu"), torch.device("cpu")), None)
    assert first is None if found is None else first is not None and first.startswith(found)


class Replayed:
    """Stands in for a captured graph where there is no GPU: a replay is a call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.replay = function
        function()


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", Replayed)
    monkeypatch.setattr(graphs, "node_types", lambda graph: [KERNEL_NODE])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@needs_cpu
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("policy", ["argmax", "early_stop", "history"])
def test_planners_answer_alike(policy: Literal["argmax", "early_stop", "history"]) -> None:
    cpu, oracle = torch.device("cpu"), backends.get("cpu")
    assert list(graphs.planned(policy, oracle, oracle, cpu)) == []
    assert next(graphs.planned(policy, Wrong("out"), oracle, cpu)).startswith("replay 0 positions")


@needs_cpu
@pytest.mark.usefixtures("no_graphs")
def test_replays_answer_as_calls_do() -> None:
    cpu, oracle = torch.device("cpu"), backends.get("cpu")
    case = BENCH[0]
    case = Case(case.name, case.inputs | {"num_reqs": torch.tensor([case.batch], dtype=torch.int32)})
    assert list(graphs.replays(case, oracle, oracle, cpu)) == []
    assert list(graphs.history(case, oracle, oracle, cpu)) == []
    assert next(graphs.replays(case, Wrong("beyond"), oracle, cpu)).endswith("written beyond its ends")


@pytest.mark.usefixtures("gpu")
def test_parts_do_not_cost_each_other_their_results(tmp_path: Path) -> None:
    parts = [
        part("first-a", "raise SystemExit(1)"),
        part("first-b", "import os; os.abort()"),
        part("second", "import time; time.sleep(60)", seconds=10),
        part("third", "record['skipped'] = 'not there'"),
        part("fourth", "pass"),
    ]
    assert gpu_check.main([str(tmp_path)], parts) == 1
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    ended = {name: entry["ended"] for name, entry in results.items() if name != "machine"}
    crashed = ended.pop("first-b")
    assert crashed.startswith("crashed")
    assert ended == {"first-a": "failed", "second": "timed out", "third": "skipped", "fourth": "passed"}
    assert [entry.get("found") for entry in results.values()] == [None, 1, 1, 1, 1, 1]
    text = (tmp_path / "gpu_check.md").read_text()
    assert all(name in text for name in results if name != "machine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.md"]


@pytest.mark.usefixtures("gpu")
def test_one_stage_alone(tmp_path: Path) -> None:
    parts = [part("first-a", "pass"), part("first-b", "pass"), part("second", "pass")]
    assert gpu_check.main([str(tmp_path), "--stage", "first"], parts) == 0
    assert set(json.loads((tmp_path / "gpu_check.json").read_text())) == {"machine", "first-a", "first-b"}
    assert gpu_check.main([str(tmp_path), "--stage", "second"], parts) == 0  # and the others stay
    assert len(json.loads((tmp_path / "gpu_check.json").read_text())) == 4


def test_record_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    record = Record(path, "timing")
    record["rows"] = [1, 2]
    Record(path, "build")["seconds"] = 3
    record["rows"] = [1, 2, 3]
    assert json.loads(path.read_text()) == {"timing": {"rows": [1, 2, 3]}, "build": {"seconds": 3}}
    record.clear()
    assert json.loads(path.read_text())["timing"] == {}


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (0, f"3 {sanitizer.AGREE}\n===== ERROR SUMMARY: 0 errors", "passed, 3 calls"),
        (sanitizer.FOUND, f"===== Invalid write\n3 {sanitizer.AGREE}", "failed: ===== Invalid write"),
        (1, f"{sanitizer.DIFFER} on 64x15: decision[0]: 1, expected 2", f"failed: {sanitizer.DIFFER} on 64x15"),
        (1, "===== Invalid __global__ write of size 4 bytes", "failed: ===== Invalid"),
        (sanitizer.FOUND, "===== Barrier error detected.", "failed: ===== Barrier"),
        (1, "RuntimeError: CUDA error: unknown error", "skipped, the tool gave up: RuntimeError"),
        (255, "===== Error: Device not supported", "skipped, the tool gave up: ===== Error: Device not supported"),
    ],
)
def test_a_tool_that_refuses_is_not_a_failure(status: int, text: str, expected: str) -> None:
    assert sanitizer.verdict(status, text).startswith(expected)


def test_timed_cases_are_the_grid_and_more() -> None:
    cases = timed_cases()
    assert cases[0].name == "64x15"
    assert {case.name for case in BENCH} < {case.name for case in cases}
    assert {case.buckets for case in cases} == {4, 32, 256}
    assert len({case.name for case in cases}) == len(cases) == len(BENCH) + 6
    budgets = more_buckets(64, 15, 32).inputs["budgets"].tolist()
    assert (budgets[0], budgets[-1]) == (64, 1024)
    assert budgets == sorted(set(budgets))


@pytest.mark.parametrize(("cuda_us", "met"), [(5.9, [True, True]), (6.1, [False, True]), (40, [False, False])])
def test_goals(cuda_us: float, met: list[bool]) -> None:
    row = {"case": "64x15", "empty_us": 2.0, "cuda_us": cuda_us, "triton_us": 1.0, "eager_us": 500.0}
    row |= {"cuda_per_empty": cuda_us / 2, "eager_per_cuda": 500 / cuda_us}
    found = goals(row)
    assert [goal["met"] for goal in found] == met


def test_report_has_every_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Record(path, "machine")["gpu"] = "a GPU"
    timing = Record(path, "timing")
    timing["ended"], timing["seconds"] = "failed", 12.0
    timing["rows"] = [{"case": "1x7", "empty_us": 1.5, "cuda_us": 3.25, "cuda_per_empty": 2.166}]
    timing["goals"] = [{"goal": "empty kernels, at most", "bound": 3.0, "measured": 3.5, "met": False}]
    cuda = Record(path, "correctness-cuda")
    cuda["registry"] = {"cases": 300, "failed": 2, "failures": ["x"], "not_reached": 7}
    text = report(path)
    assert "a GPU" in text
    assert "registry 298/300; 7 not reached" in text
    assert "|  1x7 |  1.50 | 3.25 |   2.17 |" in text
    assert "MISSED: empty kernels, at most 3: 3.50" in text


@pytest.mark.parametrize("case", [case for case in BENCH if case.batch <= 64], ids=str)
def test_eager_stays_on_its_device(case: Case) -> None:
    """Whatever it makes lies where its inputs are, not on the default device."""
    want = eager.select_and_pack(**case.inputs)
    with torch.device("meta"):
        got = eager.select_and_pack(**case.inputs)
    assert all(t.device.type == "cpu" for t in got)
    assert all(tensor_difference(name, a, b) is None for name, a, b in zip(want._fields, got, want, strict=True))


def test_eager_under_compile() -> None:
    case = next(case for case in BENCH if case.name == "64x15")
    compiled = torch.compile(eager.select_and_pack, backend="eager")
    want, got = eager.select_and_pack(**case.inputs), compiled(**case.inputs)
    assert all(tensor_difference(name, a, b) is None for name, a, b in zip(want._fields, got, want, strict=True))
