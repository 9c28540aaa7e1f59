"""What NVRTC makes of the CUDA headers, without a GPU, a driver or CuPy; `microbench/gpu_check.sh` launches it."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dcut_kernels import _bind, _load, _params, _schema, jit
from dcut_kernels._check import Sizes
from dcut_kernels.jit import launch, source
from dcut_kernels.ops import Backend
from microbench.cases import BENCH, bench_case
from python_tests.compare import composed

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
HEADERS = sorted(p.name for p in (source.include_dir() / "dcut").iterdir() if not p.name.startswith("launch"))
ARCHITECTURES = (75, 80, 90, 100, 120)
needs_library = pytest.mark.skipif(_load.missing("cpu") is not None, reason="only the reference is built")


def compiled(code: str, arch: int, kernels: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile for one architecture and return the symbol of each kernel; the test fails with the compiler's log."""
    _, program = nvrtc.nvrtcCreateProgram(code.encode(), b"kernels.cu", 0, None, None)
    for name in kernels:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    options = [option.encode() for option in (f"-arch=sm_{arch}", *source.options())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * (size + 1)  # the byte string of one space is shared by everyone, and nvrtc writes to it
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * (size + 1)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    symbols = {name: nvrtc.nvrtcGetLoweredName(program, name.encode())[1].decode() for name in kernels}
    assert all(f".text.{symbol}".encode() in cubin for symbol in symbols.values())
    return symbols


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: int) -> None:
    symbols = compiled(source.source(), arch, source.KERNELS)
    assert len(set(symbols.values())) == len(source.KERNELS)


@pytest.mark.parametrize("header", HEADERS)
def test_headers_stand_alone(header: str) -> None:
    compiled(f'#include "dcut/{header}"\n#include "dcut/{header}"\n', 90)


def test_every_kernel_is_there() -> None:
    """No kernel of the headers is left out."""
    text = "".join(path.read_text() for path in (source.include_dir() / "dcut").glob("*.cuh"))
    found = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", text)
    assert {name.partition("<")[0].rpartition("::")[2] for name in source.KERNELS} == set(found)


def test_storages_are_those_of_the_header() -> None:
    text = (source.include_dir() / "dcut" / "plan.h").read_text()
    names = re.search(r"enum class Storage : int32_t \{([^}]*)\}", text)[1].replace(" ", "").split(",")
    assert [name.rpartition("::")[2].rstrip(">") for name in source.SELECT] == names


def test_source_changes_with_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's cache looks at the text and the options, not at what is included."""
    before = source.source()
    for path in (source.include_dir() / "dcut").iterdir():
        target = tmp_path / "dcut" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    monkeypatch.setattr(source, "include_dir", lambda: tmp_path)
    assert source.source() == before
    (tmp_path / "dcut" / "order.h").write_text("changed")
    assert source.source() != before


def test_headers_of_the_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, checkout = tmp_path / "dcut_kernels" / "include", tmp_path / "csrc" / "include"
    monkeypatch.setattr(source, "_PACKAGE", tmp_path / "dcut_kernels")
    with pytest.raises(RuntimeError, match=re.escape(f"include: expected dcut/step.cuh in {package} or {checkout}")):
        source.include_dir()
    for folder in (checkout, package):
        (folder / "dcut").mkdir(parents=True)
        (folder / "dcut" / "step.cuh").touch()
        assert source.include_dir() == folder


STRUCTS = (_params.Rows, _params.Scores, _params.Tables, _params.Tokens, _params.Packed, _params.Decision, _params.Plan)


def test_structs_are_those_of_the_header() -> None:
    checks = ['#include "dcut/plan.h"']
    for struct in STRUCTS:
        name = name_of(struct)
        checks.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, *_ in struct._fields_:
            descriptor = getattr(struct, field)
            checks.append(f"static_assert(__builtin_offsetof({name}, {field}) == {descriptor.offset});")
            checks.append(f"static_assert(sizeof({name}::{field}) == {descriptor.size});")
    compiled("\n".join(checks), 90)


@needs_library
def test_launches_fit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is launched with parameters of its types, in its order."""
    calls: dict[str, tuple[Any, ...]] = {}
    monkeypatch.setattr(launch, "_launch", lambda name, plan, device, *rest: calls.update({name: (*rest, plan)}))
    monkeypatch.setattr(launch, "_shared_limit", lambda device: 64 * 1024)
    library = _schema.define("dcut_jit_on_cpu")
    _bind.register(library, "CPU", launch.CupyKernels(), one_launch=True)
    backend = Backend("jit", "dcut_jit_on_cpu")
    for case in (bench_case(64, 15), bench_case(256, 31), bench_case(1024, 31)):
        backend.select_and_pack(**case.inputs)
        composed(backend, case.inputs)
    assert set(calls) == set(source.KERNELS)
    checks = [source.source(), "template <class, class> constexpr bool same = false;"]
    checks.append("template <class T> constexpr bool same<T, T> = true;")
    for name, parameters in calls.items():
        types = [type_of(parameter) for parameter in parameters]
        either = [f"same<decltype(&{name}), void (*)({', '.join(types).format(const)})>" for const in ("", "const ")]
        checks.append(f"static_assert({' || '.join(either)});")
    compiled("\n".join(checks), 90)


def name_of(struct: type[ctypes.Structure]) -> str:
    return f"dcut::{'gpu::' * (struct is _params.Plan)}{struct.__name__}"


def type_of(parameter: ctypes.Structure | torch.Tensor) -> str:
    return "{}int32_t*" if isinstance(parameter, torch.Tensor) else name_of(type(parameter))


@needs_library
@pytest.mark.parametrize("operation", launch.OPERATIONS)
def test_plans(operation: str) -> None:
    """A shape that every device takes, and more shared memory only where the device has it."""
    for batch, draft_len in ((0, 0), (1, 7), (64, 15), (256, 15), (1024, 63), (4096, 15)):
        sizes = Sizes(batch, batch, draft_len, 4, batch * (draft_len + 1))
        for limit in (0, 64 * 1024, 227 * 1024):
            shape = launch.make_plan(operation, sizes, limit)
            assert shape.storage in range(len(source.SELECT))
            assert shape.blocks == 1 or operation == "log_prefix_sum"  # others of several blocks are clusters
            assert shape.threads % 32 == 0
            assert 32 <= shape.threads <= 1024
            assert 0 <= shape.shared_bytes <= max(limit, 48 * 1024)
            if operation == "bucket_argmax":
                assert bytes(shape) == bytes(launch.make_plan("segmented_topk", sizes, limit))


def test_operators_are_registered() -> None:
    assert jit.backend.namespace == "dcut_jit"
    with pytest.raises(
        RuntimeError, match=r"dcut_kernels\.jit\.select_and_pack: expected CUDA tensors, got CPU tensors"
    ):
        jit.select_and_pack(**BENCH[0].inputs)
    fake = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in BENCH[0].inputs.values()]
    assert jit.select_and_pack(*fake).keep_lens.shape == (1,)


def test_without_cupy() -> None:
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    with pytest.raises(
        RuntimeError, match=r"cupy: expected CuPy 14 or newer, got .*Install cupy-cuda12x or cupy-cuda13x"
    ):
        launch._module()


def test_import_touches_no_gpu() -> None:
    code = "import sys, dcut_kernels.jit, torch; print('cupy' in sys.modules, torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr
