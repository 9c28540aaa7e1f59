"""Which backend serves which device, what forces another, and what is said where one is missing."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dcut_kernels import _load, backends
from dcut_kernels.ops import Backend
from python_tests.child import ANSWER, STEP, answer_of, bare_copy, run

REPORT = """
import json
from dcut_kernels import backends
print(json.dumps([backends.chosen("cpu"), backends.chosen("cuda"), backends.explain().splitlines()]))
"""
NO_TRITON = "import sys; sys.modules['triton'] = None\n"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def best(*names: str) -> str | None:
    """The first backend that can be bound here."""
    return next((name for name in names if _load.missing(name) is None), None)


def missing_of(script: str, path: Path | None = None) -> str:
    """The last line of the error that ends a script."""
    done = run(script, path)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_available() -> None:
    here = {"cuda": torch.cuda.is_available() and not _load.missing("cuda"), "triton": HAS_TRITON}
    bound = {name: _load.missing(name) is None for name in ("reference", "cpu", "cuda", "triton", "simt")}
    assert backends.available() == [name for name, found in (bound | here).items() if found]
    for name in backends.available():
        backend = backends.get(name)
        assert isinstance(backend, Backend)
        assert backend is backends.get(name)
        assert repr(backend) == f"<dcut_kernels backend {name!r}>"


def test_chosen() -> None:
    assert backends.chosen() == backends.chosen("cpu") == backends.chosen(torch.device("cpu"))
    chosen = answer_of(REPORT)[:2]
    assert chosen == [best("cpu", "reference"), best("cuda", "triton")]


def test_explain_names_every_backend() -> None:
    text = backends.explain()
    served = f"cpu ({_load.cpu_isa()})" if not _load.missing("cpu") else "reference (Python integers: correct, slow)"
    cpu, cuda = re.match(r"CPU tensors: (.*)\n(?:  .*\n)*CUDA tensors: (.*)\n", text).groups()
    gpu = best("cuda", "triton")
    if gpu and not torch.cuda.is_available():
        gpu = f"none, as there is no CUDA device; one would be served by {gpu}"
    assert (cpu, cuda) == (served, gpu or "none")
    reasons = re.findall(r"^  not (\w+): .{10,}$", text, re.MULTILINE)
    others = ["reference" if best("cpu") else "cpu", *({"cuda", "triton", "reference"} - {backends.chosen("cuda")})]
    assert sorted(reasons) == sorted(others)
    assert text.endswith(f"For tests: simt {'not available' if _load.missing('simt') else 'available'}")


@pytest.mark.skipif(best("cuda", "triton") is None, reason="no backend for CUDA tensors is installed")
@pytest.mark.parametrize("there", [False, True])
def test_explain_knows_whether_there_is_a_device(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    name = backends.chosen("cuda")
    served = name if there else f"none, as there is no CUDA device; one would be served by {name}"
    assert f"CUDA tensors: {served}" in backends.explain().splitlines()


def test_unknown_backend() -> None:
    with pytest.raises(RuntimeError, match="name: expected reference, cpu, cuda, triton or simt, got 'gpu'"):
        backends.get("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    reason = _load.missing("cuda") or "there is no CUDA device"
    with pytest.raises(RuntimeError, match=re.escape(f"backend 'cuda' is not available: {reason}")):
        backends.get("cuda")


@pytest.mark.parametrize("name", ["cpu", "cuda", "triton", "reference"])
def test_forced(name: str) -> None:
    """A backend that is there serves the devices it can serve, and the others keep their own."""
    if reason := _load.missing(name):
        pytest.skip(reason)
    done = run(f"{STEP}\nassert step() == {ANSWER}\n{REPORT}", DCUT_BACKEND=name)
    assert done.stderr == ""  # not even a warning that the reference is slow
    cpu, cuda, lines = json.loads(done.stdout)
    assert cpu == (name if name in ("cpu", "reference") else best("cpu", "reference"))
    assert cuda == (name if name in ("cuda", "triton", "reference") else best("cuda", "triton"))
    forced = [found[1] for line in lines if (found := re.search(r"(\w+)( \(.*\))?, forced by DCUT_BACKEND$", line))]
    assert forced == [name] * (2 if name == "reference" else 1)
    others = [line for line in lines if line.endswith(": DCUT_BACKEND names another")]
    assert all(f"not {name}" not in line for line in others)
    assert len(others) == sum(
        not _load.missing(other)
        for device, choices in _load.CHOICES.items()
        if name in choices
        for other in choices
        if other != name
    )


@pytest.mark.parametrize("value", ["simt", "CPU"])
def test_forced_unknown(value: str) -> None:
    done = run("import dcut_kernels", DCUT_BACKEND=value)
    message = f"ImportError: DCUT_BACKEND: expected cpu, cuda, reference, triton, got '{value}'"
    assert done.stderr.splitlines()[-1] == message


def test_forced_empty_means_not_forced() -> None:
    assert answer_of(REPORT, DCUT_BACKEND="") == answer_of(REPORT)


def test_forced_not_available(tmp_path: Path) -> None:
    copy = bare_copy(tmp_path)
    for name in ("cpu", "cuda", "triton"):
        done = run(NO_TRITON + "import dcut_kernels", copy, DCUT_BACKEND=name)
        error = done.stderr.splitlines()[-1]
        assert error.startswith(
            f"ImportError: DCUT_BACKEND: expected a backend that is available, got '{name}': "
            + ("triton is not installed" if name == "triton" else "the compiled library is not installed: ")
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "backends.get('triton')",
            "RuntimeError: backend 'triton' is not available: triton is not installed (pip install triton)",
        ),
        (
            "torch.ops.dcut_triton.log_prefix_sum(torch.ones(2, 3))",
            "ImportError: triton: expected version 3.6 or newer, got none; pip install 'dcut_kernels[triton]'",
        ),
    ],
)
def test_without_triton(call: str, message: str) -> None:
    assert missing_of(f"{NO_TRITON}import torch\nfrom dcut_kernels import backends\n{call}") == message


BARE = f"""
import json
{STEP}
from dcut_kernels import _load, backends

def refused(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)

names = ("cpu", "cuda", "simt")
refusals = [refused(backends.get, name) for name in names] + [refused(_load.cpu_isa)]
on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
refusals.append(refused(torch.ops.dcut.log_prefix_sum.default.redispatch, on_cuda, torch.ones(2, 3)))
print(json.dumps([step(), backends.available(), backends.chosen(), backends.explain(), refusals]))
"""


@pytest.mark.parametrize("reason", [None, "no C++ compiler was found"])
def test_without_the_library(tmp_path: Path, reason: str | None) -> None:
    """The public operators run on the reference, and say why."""
    copy = bare_copy(tmp_path)
    where = copy / "dcut_kernels"
    if reason is not None:
        (where / "_build.json").write_text(json.dumps({"library": None, "reason": reason}))
    reason = reason or f"{where} was never built; see its CONTRIBUTING.md, or import from elsewhere"
    warned = run("import dcut_kernels", copy).stderr
    assert f"RuntimeWarning: dcut_kernels runs on its reference, which is correct but slow: {reason}" in warned
    step, available, chosen, explained, refusals = answer_of(NO_TRITON + BARE, copy)
    assert (step, available, chosen) == (ANSWER, ["reference"], "reference")
    lines = explained.splitlines()
    assert lines[0] == "CPU tensors: reference (Python integers: correct, slow)"
    assert "CUDA tensors: none" in lines
    not_installed = f"the compiled library is not installed: {reason}"
    no_triton = "triton is not installed (pip install triton)"
    assert {f"  not cpu: {not_installed}", f"  not cuda: {not_installed}", f"  not triton: {no_triton}"} < set(lines)
    assert lines[-1] == "For tests: simt not available"
    assert refusals == [
        f"backend 'cpu' is not available: {not_installed}",
        f"backend 'cuda' is not available: {not_installed}",
        "backend 'simt' is not available: the emulated CUDA kernel is for tests and only in editable installs with "
        "pybind11",
        f"the compiled library is not loaded: {reason}",
        f"dcut_kernels has no backend for CUDA tensors here (cuda: {not_installed}; triton: {no_triton})",
    ]


def test_library_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built without nvcc says what was missing."""

    class Library:
        @staticmethod
        def dcut_has_cuda() -> bool:
            return False

    build: dict[str, Any] = {"library": "libdcut.so", "cuda": False, "cuda_reason": "no nvcc was found at build time"}
    monkeypatch.setattr(_load, "_compiled", Library())
    monkeypatch.setattr(_load, "BUILD", build)
    assert _load.missing("cpu") is None
    assert _load.missing("cuda") == "not compiled: no nvcc was found at build time"


@pytest.mark.skipif(_load.missing("cpu") is not None, reason="only the reference is built")
def test_the_record_is_true() -> None:
    """What _build.json says about CUDA is what the library holds."""
    build = _load.BUILD
    assert build["cuda"] is _load._compiled.dcut_has_cuda()
    assert bool(build["cuda"]) == bool(build["cuda_archs"]) != bool(build["cuda_reason"])
