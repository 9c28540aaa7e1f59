"""What importing the package does, and does not do; which backend serves; what the library contains."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcut_kernels
from dcut_kernels import _load, backends
from dcut_kernels.ops import Backend

PACKAGE = Path(dcut_kernels.__file__).parent
LIBRARY = PACKAGE / "libdcut.so"
needs_library = pytest.mark.skipif(not _load.has_library(), reason="only the reference is built")

ROWS = "Tensor? draft_lens=None, Tensor? min_keep=None, Tensor? max_keep=None, Tensor? weight=None, "
SELECT = (
    "Tensor confidence, Tensor draft_ids, Tensor bonus_ids, Tensor seq_lens, Tensor budgets, Tensor costs, *, "
    + ROWS
    + "Tensor? row_index=None, Tensor? base_lens=None, Tensor? num_reqs=None, Tensor? block_table=None, "
    'SymInt block_size=0, str score="inclusive", str policy="argmax", Tensor? budget=None, Tensor? calibration=None, '
    "Tensor? envelope=None, Tensor(next!)? next_budget=None, Tensor(host!)? host_budget=None, bool count_bonus=True, "
    "bool log_confidence=False, int pad_token=0, SymInt? capacity=None"
)
RESULTS = (
    "(Tensor keep_lens, Tensor cu_seqlens, Tensor kv_lens, Tensor token_ids, Tensor positions, Tensor request_ids, "
    "Tensor slot_mapping, Tensor draft_index, Tensor logits_indices, Tensor decision, Tensor gains)"
)
OUT = (
    "Tensor(keep_lens!) keep_lens, Tensor(cu_seqlens!) cu_seqlens, Tensor(kv_lens!) kv_lens, "
    "Tensor(token_ids!) token_ids, Tensor(positions!) positions, Tensor(request_ids!) request_ids, "
    "Tensor(slot_mapping!) slot_mapping, Tensor(draft_index!) draft_index, Tensor(logits_indices!) logits_indices, "
    "Tensor(decision!) decision, Tensor(gains!) gains"
)
SCHEMAS = {
    "select_and_pack": f"({SELECT}) -> {RESULTS}",
    "select_and_pack.out": f"({SELECT}, {OUT}) -> ()",
    "log_prefix_sum": (
        '(Tensor confidence, *, Tensor? row_index=None, str score="inclusive", Tensor? calibration=None, '
        "bool log_confidence=False) -> Tensor"
    ),
    "segmented_topk": (
        f"(Tensor prefix, Tensor budgets, *, {ROWS}Tensor? base_lens=None, Tensor? num_reqs=None, "
        "SymInt? capacity=None) -> Tensor"
    ),
    "bucket_argmax": (
        f"(Tensor prefix, Tensor budgets, Tensor costs, *, {ROWS}Tensor? base_lens=None, Tensor? num_reqs=None, "
        'str policy="argmax", Tensor? budget=None, Tensor? envelope=None, Tensor(next!)? next_budget=None, '
        "Tensor(host!)? host_budget=None, bool count_bonus=True, SymInt? capacity=None) "
        "-> (Tensor decision, Tensor gains)"
    ),
    "pack_prefixes": (
        "(Tensor keep_lens, Tensor draft_ids, Tensor bonus_ids, Tensor seq_lens, *, Tensor? row_index=None, "
        "Tensor? base_lens=None, Tensor? num_reqs=None, Tensor? block_table=None, SymInt block_size=0, "
        f"int pad_token=0, SymInt? capacity=None) -> {RESULTS}"
    ),
}
SIGNATURES = {
    "select_and_pack": (
        "confidence, draft_ids, bonus_ids, seq_lens, budgets, costs, *, draft_lens=None, min_keep=None, max_keep=None, "
        "weight=None, row_index=None, base_lens=None, num_reqs=None, block_table=None, block_size=0, "
        "score='inclusive', policy='argmax', budget=None, calibration=None, envelope=None, next_budget=None, "
        "host_budget=None, count_bonus=True, log_confidence=False, pad_token=0, capacity=None, out=None"
    ),
    "log_prefix_sum": "confidence, *, row_index=None, score='inclusive', calibration=None, log_confidence=False",
    "segmented_topk": (
        "prefix, budgets, *, draft_lens=None, min_keep=None, max_keep=None, weight=None, base_lens=None, "
        "num_reqs=None, capacity=None"
    ),
    "bucket_argmax": (
        "prefix, budgets, costs, *, draft_lens=None, min_keep=None, max_keep=None, weight=None, base_lens=None, "
        "num_reqs=None, policy='argmax', budget=None, envelope=None, next_budget=None, host_budget=None, "
        "count_bonus=True, capacity=None"
    ),
    "pack_prefixes": (
        "keep_lens, draft_ids, bonus_ids, seq_lens, *, row_index=None, base_lens=None, num_reqs=None, "
        "block_table=None, block_size=0, pad_token=0, capacity=None"
    ),
}

# A step of two requests: what every child process computes, and its answer.
STEP = """
import torch
import dcut_kernels

def step():
    confidence = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    ids = torch.arange(6, dtype=torch.int32).view(2, 3)
    bonus, budgets = torch.tensor([7, 8], dtype=torch.int32), torch.tensor([2, 6], dtype=torch.int32)
    batch = dcut_kernels.select_and_pack(confidence, ids, bonus, bonus, budgets, torch.tensor([2.0, 2.5]))
    return batch.token_ids.tolist()
"""
ANSWER = [7, 0, 1, 8, 3, 4, 0, 0]


def run(script: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, with the package at `path` or this one."""
    environment = os.environ | {"PYTHONPATH": str(path or PACKAGE.parent)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=path)


def answer_of(script: str, path: Path | None = None) -> Any:
    """What a script prints last, as JSON."""
    done = run(script, path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("namespace", ["dcut", "dcut_cpu", "dcut_reference"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_frozen(name: str, namespace: str) -> None:
    op, _, overload = name.partition(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")._schema
    assert str(schema) == f"{namespace}::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name: str) -> None:
    for functions in (dcut_kernels, backends.get("reference")):
        signature = inspect.signature(getattr(functions, name))
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("namespace", ["dcut", *(f"dcut_{name}" for name in backends.available())])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_operator_has_a_kernel(name: str, namespace: str) -> None:
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"{namespace}::{name}", "CPU")
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"{namespace}::{name}", "Meta")


def test_import_is_light() -> None:
    """Importing and calling load no compiler, no CUDA and no further package, and start no process or thread."""
    script = f"""
import json, os, sys, torch
loaded, threads, events = set(sys.modules), len(os.listdir("/proc/self/task")), []
starts = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
sys.addaudithook(lambda event, _: events.append(event) if event in starts else None)
{STEP}
new = sorted({{name.partition(".")[0] for name in set(sys.modules) - loaded}} - {{"dcut_kernels"}})
here = sorted(name for name in sys.modules if name.startswith("dcut_kernels.demo"))
heavy = [name for name in ("torch._dynamo", "torch._inductor", "triton", "cupy") if name in set(sys.modules) - loaded]
idle = len(os.listdir("/proc/self/task")) - threads
assert step() == {ANSWER}
heavy += [name for name in ("torch._dynamo", "torch._inductor", "triton", "cupy") if name in set(sys.modules) - loaded]
print(json.dumps([new, here, heavy, events, idle, torch.cuda.is_initialized()]))
"""
    assert answer_of(script) == [[], [], [], [], 0, False]


def test_fork() -> None:
    """A child of a process that has used the operators gets the same answer."""
    script = f"""
import json, multiprocessing, os, sys
{STEP}
assert step() == {ANSWER}
child = os.fork()
if child == 0:
    os._exit(0 if step() == {ANSWER} else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with multiprocessing.get_context("fork").Pool(2) as pool:
    answers = [pool.apply_async(step) for _ in range(8)]
    print(json.dumps([status, [answer.get(60) for answer in answers], step()]))
"""
    assert answer_of(script) == [0, [ANSWER] * 8, ANSWER]


def test_backends() -> None:
    assert backends.available() == ["reference", *(["cpu"] if _load.has_library() else [])]
    for name in backends.available():
        backend = backends.get(name)
        assert isinstance(backend, Backend)
        assert backend is backends.get(name)
        assert repr(backend) == f"<dcut_kernels backend {name!r}>"
    assert backends.chosen() == backends.chosen("cpu") == backends.available()[-1]
    assert backends.chosen(torch.device("cpu")) == backends.chosen()
    assert backends.chosen("cuda") is None


def test_missing_backends() -> None:
    for name in ("cuda", "triton", "simt"):
        kernel = {"cuda": "CUDA", "triton": "Triton", "simt": "emulated CUDA"}[name]
        message = f"backend '{name}' is not available: the {kernel} kernel is not part of this version"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            backends.get(name)
    with pytest.raises(RuntimeError, match="name: expected reference, cpu, cuda, triton or simt, got 'gpu'"):
        backends.get("gpu")


def test_functions_pickle() -> None:
    for backend in [backends.get(name) for name in backends.available()]:
        again = pickle.loads(pickle.dumps(backend.select_and_pack)).__self__
        assert (again.name, again.namespace) == (backend.name, backend.namespace)
    assert pickle.loads(pickle.dumps(dcut_kernels.select_and_pack)).__self__.namespace == "dcut"


def test_explain_names_every_backend() -> None:
    lines = backends.explain().splitlines()
    served = f"cpu ({_load.cpu_isa()})" if _load.has_library() else "reference (Python integers: correct, slow)"
    assert lines[:2] == [f"CPU tensors: {served}", "CUDA tensors: none"]
    others = {"cpu", "reference", "cuda", "triton", "simt"} - {backends.chosen()}
    reasons = re.findall(r"^  not (\w+): .{10,}$", "\n".join(lines[2:]), re.MULTILINE)
    assert len(lines[2:]) == len(reasons)
    assert set(reasons) == others


@needs_library
def test_instruction_sets() -> None:
    start = _load.cpu_isa()
    try:
        assert _load.cpu_isa("portable") == "portable" == _load.cpu_isa()
        assert "CPU tensors: cpu (portable)" in backends.explain()
        message = r"name: expected an instruction set of this machine, one of .*, got 'sse9'"
        with pytest.raises(RuntimeError, match=message):
            _load.cpu_isa("sse9")
        assert _load.cpu_isa() == "portable"
    finally:
        assert _load.cpu_isa(start) == start


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package without its library."""
    ignore = shutil.ignore_patterns("libdcut.so", "_build.json", "__pycache__", "demo")
    shutil.copytree(PACKAGE, tmp_path / "dcut_kernels", ignore=ignore)
    return tmp_path


BARE = f"""
import json
{STEP}
from dcut_kernels import _load, backends
try:
    backends.get("cpu")
except RuntimeError as error:
    refused = str(error)
try:
    _load.cpu_isa()
except RuntimeError as error:
    no_isa = str(error)
print(json.dumps([step(), backends.available(), backends.chosen(), backends.explain(), refused, no_isa]))
"""


@pytest.mark.parametrize("reason", [None, "no C++ compiler was found"])
def test_without_the_library(copy: Path, reason: str | None) -> None:
    """The public operators run on the reference, and say why."""
    if reason is not None:
        (copy / "dcut_kernels" / "_build.json").write_text(json.dumps({"library": None, "reason": reason}))
    where = copy / "dcut_kernels"
    reason = reason or f"{where} was never built; see its CONTRIBUTING.md, or import from elsewhere"
    warned = run("import dcut_kernels", copy).stderr
    assert f"RuntimeWarning: dcut_kernels runs on its reference, which is correct but slow: {reason}" in warned
    step, available, chosen, explained, refused, no_isa = answer_of(BARE, copy)
    assert (step, available, chosen) == (ANSWER, ["reference"], "reference")
    assert explained.splitlines()[0] == "CPU tensors: reference (Python integers: correct, slow)"
    assert f"  not cpu: the compiled library is not installed: {reason}" in explained.splitlines()
    assert refused == f"backend 'cpu' is not available: the compiled library is not installed: {reason}"
    assert no_isa == f"the compiled library is not loaded: {reason}"


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_broken_library(copy: Path, content: bytes | None) -> None:
    """A library that does not load is an error that names the fix, never a silent fallback."""
    package = copy / "dcut_kernels"
    (package / "_build.json").write_text(json.dumps({"library": "libdcut.so", "torch": "9.9.9"}))
    if content is not None:
        (package / "libdcut.so").write_bytes(content)
    done = run("import dcut_kernels", copy)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert error.startswith(f"ImportError: dcut_kernels: cannot load {package / 'libdcut.so'} with torch ")
    assert f"with torch {torch.__version__} (needs 2.11 or newer, built against 9.9.9): " in error
    assert error.endswith("Reinstall the package for this torch.")


@needs_library
@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_library_contents() -> None:
    """No Python, no CUDA, only torch's C interface; one small exported surface."""

    def readelf(option: str) -> str:
        return subprocess.run(["readelf", "-W", option, LIBRARY], capture_output=True, text=True, check=True).stdout

    dynamic = readelf("-d")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    allowed = r"(libtorch_cpu|libc10|libstdc\+\+|libm|libgcc_s|libc|ld-linux-.*)\.so[.\d]*"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic) == []

    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    named = [(fields[6], fields[7].partition("@")[0]) for fields in symbols if len(fields) >= 8]
    exported = {name for section, name in named if section != "UND"}
    imported = {name for section, name in named if section == "UND"}
    standard = re.compile(r"_ZZ?NK?St|_ZSt|_edata|_end|__bss_start|_init|_fini")  # of the C++ library and the linker
    assert {name for name in exported if not standard.match(name)} == {"dcut_cpu_isa", "dcut_cpu_set_isa"}
    assert any(name.startswith("aoti_torch_") for name in imported)
    unstable = re.compile(r"_?Py[A-Z_]|_ZNK?(2at|3c10|5torch)|THP")
    assert [name for name in imported if unstable.match(name)] == []
