"""Build, compare and time the GPU kernels on the GPU of this machine; installs and downloads nothing.

Uses the python3 that runs it, with a CUDA build of torch, and nvcc, CMake, Triton, CuPy and compute-sanitizer where
they are there.  Each part runs in a process of its own and writes what it found to ``gpu_check.json`` as it goes, so
neither a crash nor a time limit costs the others.  The table is in ``gpu_check.md`` too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # the repository instead of this folder

from microbench.gpu.record import Record  # noqa: E402
from microbench.gpu.report import report  # noqa: E402

SECONDS = 560  # for all parts together


@dataclass(frozen=True)
class Part:
    """A process of one stage.

    Attributes
    ----------
    name : str
        The stage, or the stage and what is checked, as in "correctness-cuda".
    command : tuple of str
        Arguments of Python.
    seconds : int
        Limit; the part is stopped there.
    """

    name: str
    command: tuple[str, ...]
    seconds: int

    @property
    def stage(self) -> str:
        return self.name.partition("-")[0]


PARTS = (
    Part("build", ("-m", "microbench.gpu.build"), 170),
    Part("correctness-cuda", ("-m", "microbench.gpu.correctness", "cuda"), 110),
    Part("correctness-triton", ("-m", "microbench.gpu.correctness", "triton"), 130),
    Part("timing", ("-m", "microbench.gpu.timing"), 180),
    Part("nvrtc", ("-m", "microbench.gpu.nvrtc"), 60),
    Part("sanitizer", ("-m", "microbench.gpu.sanitizer"), 120),
)


def missing_gpu() -> str | None:
    """Say why there is no GPU to check, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch: expected a CUDA build of torch 2.11 or newer in {sys.executable}, got {error!r}"
    if torch.cuda.is_available():
        return None
    why = "no GPU or driver that it can use" if torch.version.cuda else "a build without CUDA"
    return f"torch: expected a GPU that torch.cuda sees, got torch {torch.__version__}, {why}"


def machine() -> dict[str, object]:
    """What the results were measured on."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "gpus": torch.cuda.device_count(),
        "arch": f"sm_{gpu.major}{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def run_part(part: Part, out: Path, seconds: float) -> str:
    """Run one part and return how it ended: passed, failed, skipped, crashed or timed out."""
    record = Record(out, part.name)
    record.clear()
    start = time.perf_counter()
    command = [sys.executable, "-u", *part.command, "--record", str(out)]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=max(1.0, min(part.seconds, seconds))).returncode
        ended = {0: "skipped" if "skipped" in record.read() else "passed", 1: "failed"}.get(code, f"crashed ({code})")
    except subprocess.TimeoutExpired:
        ended = "timed out"
    record["ended"], record["seconds"] = ended, round(time.perf_counter() - start, 1)
    return ended


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the chosen stages; 0 if none failed and the goals are met, 1 otherwise, 2 without a GPU."""
    stages = list(dict.fromkeys(part.stage for part in parts))
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "out" / "gpu_check", help="where results go")
    parser.add_argument("--stage", action="append", choices=stages, help="only this one; may be repeated")
    args = parser.parse_args(arguments)
    if (reason := missing_gpu()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    path, deadline, good = args.out.resolve() / "gpu_check.json", time.monotonic() + SECONDS, True
    for name, value in machine().items():
        Record(path, "machine")[name] = value
        print(f"{name}: {value}")
    for part in parts:
        if args.stage and part.stage not in args.stage:
            continue
        print(f"== {part.name}", flush=True)
        ended = run_part(part, path, deadline - time.monotonic())
        print(f"== {part.name} {ended}", flush=True)
        good &= ended in ("passed", "skipped")
    text = report(path)
    (args.out / "gpu_check.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
