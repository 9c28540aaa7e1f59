"""What importing the package does, and does not do; which backend serves; what the library contains."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import dcut_kernels
from dcut_kernels import _load, _schema, backends
from python_tests.child import ANSWER, PACKAGE, STEP, answer_of, bare_copy, run

LIBRARY = PACKAGE / "libdcut.so"
NAMESPACES = ("dcut", "dcut_cpu", "dcut_cuda", "dcut_triton", "dcut_simt", "dcut_reference")
needs_library = pytest.mark.skipif(_load.missing("cpu") is not None, reason="only the reference is built")

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
    "draft_confidence": (
        "(Tensor logits, *, Tensor? temperature=None, Tensor? draft_ids=None, str[] statistics) "
        "-> (Tensor draft_ids, Tensor values)"
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
    "draft_confidence": "logits, *, temperature=None, draft_ids=None, statistics=('log_prob',)",
}


def test_namespaces_are_frozen() -> None:
    assert _schema.NAMESPACES == NAMESPACES


@pytest.mark.parametrize("namespace", NAMESPACES)
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


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_operator_has_a_kernel(name: str, namespace: str) -> None:
    """For the devices that a backend serves, whether there is one or not, and no other."""
    devices = {"cpu": {"CPU"}, "cuda": {"CUDA"}, "simt": {"CPU"}}.get(namespace.removeprefix("dcut_"), {"CPU", "CUDA"})
    if namespace in ("dcut_cpu", "dcut_cuda") and _load.missing(namespace.removeprefix("dcut_")):
        devices = set()
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    assert {key for key in ("CPU", "CUDA") if has(f"{namespace}::{name}", key)} == devices
    assert has(f"{namespace}::{name}", "Meta")


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


def test_functions_pickle() -> None:
    for backend in [backends.get(name) for name in backends.available()]:
        again = pickle.loads(pickle.dumps(backend.select_and_pack)).__self__
        assert (again.name, again.namespace) == (backend.name, backend.namespace)
    assert pickle.loads(pickle.dumps(dcut_kernels.select_and_pack)).__self__.namespace == "dcut"


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


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_broken_library(tmp_path: Path, content: bytes | None) -> None:
    """A library that does not load is an error that names the fix, never a silent fallback."""
    package = bare_copy(tmp_path) / "dcut_kernels"
    (package / "_build.json").write_text(json.dumps({"library": "libdcut.so", "torch": "9.9.9"}))
    if content is not None:
        (package / "libdcut.so").write_bytes(content)
    done = run("import dcut_kernels", tmp_path)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert error.startswith(f"ImportError: dcut_kernels: cannot load {package / 'libdcut.so'} with torch ")
    assert f"with torch {torch.__version__} (needs 2.11 or newer, built against 9.9.9): " in error
    assert error.endswith("Reinstall the package for this torch.")


@needs_library
@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_library_contents() -> None:
    """No Python, no CUDA libraries, only torch's C interface and the C++ library's; one small exported surface."""

    def readelf(option: str) -> str:
        return subprocess.run(["readelf", "-W", option, LIBRARY], capture_output=True, text=True, check=True).stdout

    dynamic = readelf("-d")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    allowed = r"(libtorch_cpu|libc10|libstdc\+\+|libm|libgcc_s|libc|libdl|librt|libpthread|ld-linux-.*)\.so[.\d]*"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic) == []

    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    named = [(fields[6], *fields[7].replace("@@", "@").partition("@")[::2]) for fields in symbols if len(fields) >= 8]
    exported = {name for section, name, _ in named if section != "UND"}
    undefined = {(name, version) for section, name, version in named if section == "UND"}
    imported = {name for name, _ in undefined}
    standard = re.compile(r"_ZZ?NK?St|_ZSt|_edata|_end|__bss_start|_init|_fini")  # of the C++ library and the linker
    assert {name for name in exported if not standard.match(name)} == {
        "dcut_bind", "dcut_cpu_isa", "dcut_cpu_set_isa", "dcut_gpu_plan", "dcut_has_cuda"
    }  # fmt: skip
    assert any(name.startswith("aoti_torch_") for name in imported)
    versioned = r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+"
    unversioned = r"(aoti_)?torch_\w+|_ITM_\w+|__gmon_start__|_ZNK?St\w+"
    assert [
        name for name, version in undefined
        if not re.fullmatch(unversioned, name) and not re.fullmatch(versioned, version)
    ] == []  # fmt: skip
