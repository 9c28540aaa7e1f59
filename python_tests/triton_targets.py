"""Compile every Triton kernel ahead of time and report its resources; needs Triton, but no GPU and no build.

``python -m python_tests.triton_targets --target cuda:90`` compiles for one target, without it for all.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcut_kernels._check import Sizes, out_shapes
from dcut_kernels._schema import parse
from dcut_kernels.triton import kernels, ops

TARGETS = ("cuda:75", "cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx1100")
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def target(name: str) -> GPUTarget:
    """The target called ``cuda:<compute capability>`` or ``hip:<architecture>``."""
    kind, arch = name.split(":")
    return GPUTarget("cuda", int(arch), 32) if kind == "cuda" else GPUTarget("hip", arch, 32 if "gfx1" in arch else 64)


def arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Every argument of an operator, defaults filled in."""
    return {a.name: a.default_value for a in parse(name).arguments} | given


def step(
    batch: int, draft_len: int, buckets: int, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Any]:
    """Inputs of one step; what they hold does not matter."""
    int32 = torch.int32
    return {
        "confidence": torch.empty(batch, draft_len, dtype=dtype),
        "prefix": torch.empty(batch, draft_len, dtype=int32),
        "keep_lens": torch.empty(batch, dtype=int32),
        "draft_ids": torch.empty(batch, draft_len, dtype=int32),
        "bonus_ids": torch.empty(batch, dtype=int32),
        "seq_lens": torch.empty(batch, dtype=int32),
        "budgets": torch.empty(buckets, dtype=int32),
        "costs": torch.empty(buckets),
    } | options


def everything(batch: int, max_blocks: int = 8) -> dict[str, Any]:
    """Every option at once."""
    rows = {name: torch.empty(batch, dtype=torch.int32) for name in ("draft_lens", "min_keep", "max_keep")}
    rows |= {name: torch.empty(batch, dtype=torch.int32) for name in ("row_index", "base_lens")}
    table = torch.empty(batch, max_blocks, dtype=torch.int32)
    return rows | {
        "weight": torch.empty(batch),
        "num_reqs": torch.empty(1, dtype=torch.int32),
        "block_table": table,
        "block_size": 16,
        "score": "shifted",
        "count_bonus": False,
    }


def planned(draft_len: int, buckets: int) -> dict[str, Any]:
    """Every option of how the budget is chosen."""
    int32 = torch.int32
    return {
        "calibration": torch.empty(draft_len, 65, dtype=int32),
        "policy": "early_stop",
        "envelope": torch.empty(buckets, 2, dtype=int32),
        "next_budget": torch.empty(2, dtype=int32),
        "host_budget": torch.empty(1, dtype=torch.int64),
    }


def fused(
    batch: int, draft_len: int, buckets: int, fresh: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> ops.Launch:
    """The launch of the fused operator at one size."""
    args = arguments("select_and_pack", step(batch, draft_len, buckets, dtype, **options))
    sizes = Sizes(batch, batch, draft_len, buckets, batch * (draft_len + 1))
    out = {name: torch.empty(dims, dtype=dtype) for name, (dtype, dims) in out_shapes(sizes, torch.int32).items()}
    return ops.fused(args, sizes, out, fresh)


def parts(batch: int, draft_len: int, buckets: int, **options: Any) -> Iterator[ops.Launch]:
    """The launches of the four parts."""
    given = step(batch, draft_len, buckets, **options)
    sizes = Sizes(batch, batch, draft_len, buckets, batch * (draft_len + 1))
    out = {name: torch.empty(dims, dtype=dtype) for name, (dtype, dims) in out_shapes(sizes, torch.int32).items()}
    yield ops.prefixes(arguments("log_prefix_sum", given), sizes, given["prefix"])
    yield ops.depths(arguments("segmented_topk", given), sizes, torch.empty(buckets, batch, dtype=torch.int32))
    yield ops.decision_of(arguments("bucket_argmax", given), sizes, out["decision"], out["gains"])
    yield ops.packing(arguments("pack_prefixes", given), sizes, out)


def launches() -> dict[str, ops.Launch]:
    """What is compiled: the fused kernel for small to large steps, plain and with every option, and the parts."""
    found = {
        "64x15 R=4": fused(64, 15, 4),
        "64x15 R=4, all options": fused(64, 15, 4, True, torch.bfloat16, **everything(64), **planned(15, 4)),
        "64x15 R=32": fused(64, 15, 32),
        "256x15 R=4": fused(256, 15, 4),
        "128x15 R=4": fused(128, 15, 4),
        "1024x15 R=4": fused(1024, 15, 4, dtype=torch.float16, log_confidence=True),
        "1024x31 R=4": fused(1024, 31, 4),
        "1024x31 R=256, all options": fused(1024, 31, 256, **everything(1024), **planned(31, 256)),
    }
    return found | {launch.kernel: launch for launch in parts(64, 15, 4, **everything(64), **planned(15, 4))}


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one target; None where the target's tools do not say."""

    registers: int | None
    spills: int | None
    shared: int
    instructions: int
    text: str


def signature(launch: ops.Launch) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the arguments, and the values of those that are compiled in."""
    kernel = getattr(kernels, launch.kernel)
    types, constants = {}, {}
    for name in kernel.arg_names:
        value = launch.arguments[name]
        if name.isupper() or value is None:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
        else:
            types[name] = "i64" if name == "pad_token" else "i32"
    return types, constants


def compile_for(launch: ops.Launch, where: GPUTarget) -> Report:
    """Compile one launch for one target."""
    types, constants = signature(launch)
    source = ASTSource(getattr(kernels, launch.kernel), types, constants)
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=where, options=options)
    if where.backend == "hip":
        text = compiled.asm["amdgcn"]
        numbers = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
        lines = re.findall(r"^\t[vsdg][a-z0-9]*_\w+", text, re.MULTILINE)
        return Report(numbers["vgpr_count"], numbers["vgpr_spill_count"], compiled.metadata.shared, len(lines), text)
    registers, spills, instructions = _cubin(compiled.asm["cubin"])
    return Report(registers, spills, compiled.metadata.shared, instructions, compiled.asm["ptx"])


def _cubin(cubin: bytes) -> tuple[int | None, int | None, int]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    return (int(found[1]), int(found[2]) + int(found[3]), instructions) if found else (None, None, instructions)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--only", default="", help="compile only the launches whose name contains this")
    options = parser.parse_args(argv)
    print(f"triton {triton.__version__}")
    print(f"{'target':12} {'launch':28} registers  spills  shared instructions  seconds")
    spilled = 0
    for name in options.target or TARGETS:
        for label, launch in launches().items():
            if options.only not in label:
                continue
            start = time.perf_counter()
            report = compile_for(launch, target(name))
            seconds = time.perf_counter() - start
            print(f"{name:12} {label:28} {report.registers!s:>9} {report.spills!s:>7} {report.shared:7} "
                  f"{report.instructions:12} {seconds:8.1f}", flush=True)  # fmt: skip
            spilled += report.spills or 0
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
