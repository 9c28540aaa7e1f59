"""Takes every barrier and every bounds check out of the CUDA kernels, one at a time, and sees who notices.

All of them are compiled at once, each behind a switch.  ``python -m python_tests.mutation`` runs all and prints who
caught what; it ends with an error if anything survives that `ALLOWED` does not explain.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from dcut_kernels import VerifyBatch, _load, _simt_ops, backends
from dcut_kernels._check import Sizes
from dcut_kernels.ops import Backend
from microbench.build import INT32_MAX
from microbench.cases import LISTED, Case, make, random_case
from python_tests.compare import first_difference, pick, poisoned, spilled, tensor_difference
from python_tests.fuzz import garbage
from python_tests.simt_build import BUILDS, CACHE, HEADERS, ROOT, compile_module, load, sanitizer_environment

BARRIER = re.compile(r"\b__syncthreads_or\(|\b__syncthreads\(\)|\b__syncwarp\(\)|\bcluster_sync\(\)|\b\w+\.sync\(\)")
COMPARISON = re.compile(r" (?:<|<=|>|>=) ")
GUARD = re.compile(r"(?:\b\w+\.)?\b(?:exists|has_place)\([^()]*\)(?! const)")
RANGE = re.compile(r"\b(clamp|min|max)\(")
# Sizes of the launch, and loops that are unrolled: they keep nothing in range.
SHAPE = re.compile(r"\bgroup\.size\b|\bint \w+ =")
# Survivors that are right: place and text, and why removing them changes nothing.
ALLOWED: dict[tuple[str, str], str] = {
    ("bucket_argmax.cuh", "target.ties > 0"): "saves work: no ties times a score is 0",
    ("write.cuh", "position > kInt32Max"): "saves work: the search bit by bit is right for small positions too",
}

SWITCH = """
extern "C" __attribute__((visibility("default"))) int dcut_mutant;
int dcut_mutant = -1;
__attribute__((noinline, no_sanitize("thread"))) static bool dcut_is(int mutant) { return dcut_mutant == mutant; }
"""


class Change(NamedTuple):
    """One piece of source and what replaces it; ``{0}``, ``{1}``... are the pieces of `parts`."""

    begin: int
    end: int
    kind: str  # "barrier", "check" or "range"
    replacements: tuple[str, ...]
    parts: tuple[tuple[int, int], ...] = ()


class Mutant(NamedTuple):
    number: int
    place: str
    kind: str
    text: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text} -> {self.replacement}"


def blank(source: str) -> str:
    """Blank what is no code, constant conditions included, and put it on one line."""

    def spaces(match: re.Match[str]) -> str:
        return " " * len(match.group())

    for pattern in (r"//[^\n]*", r"(?m)^#.*$", r"if constexpr \([^()]*\)"):
        source = re.sub(pattern, spaces, source)
    return source.replace("\n", " ")


def brackets(code: str) -> dict[int, int]:
    """Where each bracket has its other half."""
    stack, pairs = [], {}
    for at, character in enumerate(code):
        if character in "([{":
            stack.append(at)
        elif character in ")]}":
            begin = stack.pop()
            pairs[begin], pairs[at] = at, begin
    return pairs


def ends_operand(code: str, at: int) -> bool:
    """Whether an operand of a logical operator ends at this character."""
    if code[at] in ";,?{([)]}":
        return True
    if code[at] == ":":
        return ":" not in (code[at - 1], code[at + 1])
    if code[at] == "=":
        return code[at - 1] not in "=<>!" and code[at + 1] != "="
    return code[at : at + 2] in ("&&", "||") or code[at - 1 : at + 1] in ("&&", "||")


def operand(code: str, pairs: dict[int, int], at: int) -> tuple[int, int]:
    """The bounds of the comparison whose operator is at ``at``."""
    begin, end = at, at
    while code[begin - 1] in ")]" or not ends_operand(code, begin - 1):
        begin = pairs[begin - 1] if code[begin - 1] in ")]" else begin - 1
    while code[end] in "([" or not ends_operand(code, end):
        end = pairs[end] + 1 if code[end] in "([" else end + 1
    begin += re.match(r"\s*(return )?\s*", code[begin:]).end()  # type: ignore[union-attr]
    return begin, begin + len(code[begin:end].rstrip())


def neutral(code: str, pairs: dict[int, int], begin: int, end: int) -> tuple[str, ...]:
    """What a comparison is when it does not decide: whether what it guards happens, or the other way round."""
    before, after = code[:begin].rstrip(), code[end:].lstrip()
    if before.endswith("||") or after.startswith("||"):
        return ("false",)
    if before.endswith("&&") or after.startswith("&&"):
        return ("true",)
    if after.startswith("?"):
        return "true", "false"
    return ("false",) if re.match(r"\) (return|continue|break)\b", after) else ("true",)


def arguments(code: str, pairs: dict[int, int], opening: int) -> tuple[tuple[int, int], ...]:
    """The bounds of each argument of a call."""
    found, begin, at = [], opening + 1, opening + 1
    while at <= pairs[opening]:
        if code[at] in "([{":
            at = pairs[at]
        elif code[at] == "," or at == pairs[opening]:
            found.append((begin, at))
            begin = at + 2
        at += 1
    return tuple(found)


def changes(code: str) -> Iterator[Change]:
    pairs = brackets(code)
    for match in BARRIER.finditer(code):
        if match.group().endswith("()"):
            yield Change(*match.span(), "barrier", ("void()",))
        else:
            inner = match.end(), pairs[match.end() - 1]
            yield Change(match.start(), inner[1] + 1, "barrier", ("({0})",), (inner,))
    for match in COMPARISON.finditer(code):
        begin, end = operand(code, pairs, match.start() + 1)
        header = code[code.rfind("(", 0, begin) : end] if code[:begin].rstrip().endswith(";") else ""
        if not SHAPE.search(code[begin:end]) and not SHAPE.search(header):
            yield Change(begin, end, "check", neutral(code, pairs, begin, end))
    for match in GUARD.finditer(code):
        yield Change(*match.span(), "check", ("true",))
    for match in RANGE.finditer(code):
        parts = arguments(code, pairs, match.end() - 1)
        yield Change(match.start(), pairs[match.end() - 1] + 1, "range", ("({0})",), parts)


def instrument(name: str, source: str, first: int) -> tuple[str, list[Mutant]]:
    """Put every change of a header behind a switch; ``first``: the number of the first mutant."""
    code = blank(source)
    found = sorted(changes(code), key=lambda change: (change.begin, -change.end))
    numbers, mutants = {}, []
    for change in found:
        numbers[change] = first + len(mutants)
        text = " ".join(source[change.begin : change.end].split())
        place = f"{name}:{source.count(chr(10), 0, change.begin) + 1}"
        for replacement in change.replacements:
            shown = replacement.format(*(" ".join(source[b:e].split()) for b, e in change.parts))
            mutants.append(Mutant(first + len(mutants), place, change.kind, text, shown))

    def rewritten(begin: int, end: int, within: Change | None = None) -> str:
        text, at = "", begin
        for change in found:
            if change.begin < at or change.end > end or change is within:
                continue
            text += source[at : change.begin] + switched(change)
            at = change.end
        return text + source[at:end]

    def switched(change: Change) -> str:
        original = rewritten(change.begin, change.end, change)
        text = f"bool({original})" if change.kind == "check" else original
        parts = [rewritten(*part) for part in change.parts]
        for offset, replacement in reversed(list(enumerate(change.replacements))):
            text = f"(dcut_is({numbers[change] + offset}) ? {replacement.format(*parts)} : {text})"
        return text

    return rewritten(0, len(source)), mutants


def enumerate_mutants(folder: Path | None = None) -> list[Mutant]:
    """Every mutant; with a folder, the headers go there with all of them behind switches."""
    mutants: list[Mutant] = []
    for path in sorted((HEADERS / "dcut").iterdir()):
        text = path.read_text()
        if path.name == "shim.cuh":
            text = text.replace("#pragma once\n", "#pragma once\n" + SWITCH)
        elif path.suffix == ".cuh":
            text, found = instrument(path.name, text, len(mutants))
            mutants += found
        if folder is not None:
            (folder / "dcut").mkdir(exist_ok=True)
            (folder / "dcut" / path.name).write_text(text)
    return mutants


# Running them


def step_cases() -> list[Case]:
    """Calls that reach every barrier and every check, quick ones first."""
    rng = np.random.default_rng(0)
    many = np.linspace(200, 2000, 17).astype(int)  # budgets that are searched in two lots
    few = torch.from_numpy(rng.choice(np.array([1, 0.5, 0.9], np.float32), (270, 7)))
    near_one = torch.from_numpy(1 - rng.random(270 * 7 + 1, np.float32) * 1e-5)[1:].view(270, 7)
    bases = np.where(np.arange(270) % 90 == 89, INT32_MAX, 1)
    large = [
        make("nine-buckets", near_one[:5], range(5, 32, 3)),  # lanes beyond them read what lies after the budgets
        make("nine-buckets-disabled", near_one[:5], [-1] * 9, [1] * 9),
        make("huge-base-lens", few, base_lens=bases, capacity=3000),
        make("many-buckets", few, many, np.linspace(2, 9, 17) ** 0.5, budget=700),
        make("many-buckets-unaligned", near_one, np.linspace(150, 700, 17).astype(int), num_reqs=[130]),
        make("floors-in-many-blocks", torch.zeros(275, 7), [300, 800, 1900], min_keep=[2] * 275),
    ]
    names = ("everything-at-once", "buckets-17", "draft-len-63")
    small = [case for case in LISTED if case.batch * case.draft_len <= 64 and case.buckets < 9]
    chosen = [case for case in LISTED if case.name in names]
    random = [random_case(seed, *size) for size in ((8, 8), (30, 63)) for seed in range(10)]
    return [*small[::3], *large, *random[:10], *chosen, *small[1::3], *random[10:]]


def launches(case: Case, turn: int) -> Iterator[dict[str, int | str]]:
    """How the emulation runs a case: every storage and cluster that it has."""
    schedule = ("forward", "reverse", "shuffled", "shuffled")[turn % 4]
    common: dict[str, int | str] = {"schedule": schedule, "seed": turn, "fill": (0xCD, 0)[turn % 2]}
    yield common
    sizes = Sizes(case.batch, case.batch, case.draft_len, case.buckets, case.capacity)
    if _load.gpu_plan(0, sizes, 1 << 20, 8).storage != 0:
        yield common | {"cluster": 1}
        yield common | {"shared_limit": 20_000}


class Step(NamedTuple):
    """One case and what the CPU kernel answers to it."""

    case: Case
    new: VerifyBatch
    reused: VerifyBatch
    prefixes: tuple[torch.Tensor, ...]
    depths: torch.Tensor
    ranked: tuple[tuple[torch.Tensor, ...], ...]  # by prefix
    packed: VerifyBatch

    @classmethod
    def of(cls, case: Case) -> Step:
        cpu = backends.get("cpu")
        new, reused = (cpu.select_and_pack(**case.inputs, **out) for out in ({}, {"out": poisoned(case)}))
        prefix = cpu.log_prefix_sum(**pick(cpu.log_prefix_sum, case.inputs))
        prefixes = prefix, garbage(prefix, case.batch)
        depths = torch.arange(case.batch, dtype=torch.int32) * 7 % (case.draft_len + 4) - 2
        packed = cpu.pack_prefixes(depths, **pick(cpu.pack_prefixes, case.inputs))
        return cls(case, new, reused, prefixes, depths, tuple(cls.ranks(cpu, case, p) for p in prefixes), packed)

    @staticmethod
    def ranks(backend: Backend, case: Case, prefix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keep = backend.segmented_topk(prefix, **pick(backend.segmented_topk, case.inputs))
        return (keep, *backend.bucket_argmax(prefix, **pick(backend.bucket_argmax, case.inputs)))

    def difference(self, simt: ModuleType, turn: int) -> str | None:
        """Run every emulated kernel; what differs first, or None."""
        backend, inputs = backends.get("simt"), self.case.inputs
        for launch in launches(self.case, turn):
            simt.configure(**launch)
            out = poisoned(self.case)
            found = first_difference(backend.select_and_pack(**inputs, out=out), self.reused) or spilled(out)
            if found:
                return found
        found = first_difference(backend.select_and_pack(**inputs), self.new)
        prefix = backend.log_prefix_sum(**pick(backend.log_prefix_sum, inputs))
        found = found or tensor_difference("prefix", prefix, self.prefixes[0])
        for given, expected in zip(self.prefixes, self.ranked, strict=True):
            got = self.ranks(backend, self.case, given)
            for name, *both in zip(("keep", "decision", "gains"), got, expected, strict=True):
                found = found or tensor_difference(name, *both)
        packed = backend.pack_prefixes(self.depths, **pick(backend.pack_prefixes, inputs))
        return found or first_difference(packed, self.packed)


def notice(simt: ModuleType, steps: list[Step]) -> str | None:
    """What the first step to notice says."""
    for turn, step in enumerate(steps):
        try:
            found = step.difference(simt, turn)
        except RuntimeError as error:
            found = str(error).splitlines()[0]
        if found:
            return f"{step.case}: {found}"
    return None


def in_child(simt: ModuleType, steps: list[Step], seconds: int) -> tuple[str | None, float]:
    """Run all steps in a copy of this process, which may crash."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            found = notice(simt, steps)
            print(found or "", file=sys.stderr, flush=True)
            os._exit(1 if found else 0)
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        lines = output.read().splitlines()
    reports = [line for line in lines if re.search(r"ERROR: \w+Sanitizer|runtime error:", line)]
    if status == 0:
        return None, usage.ru_utime
    if os.WIFEXITED(status):
        return (reports or lines)[0 if reports else -1], usage.ru_utime
    name = signal.Signals(os.WTERMSIG(status)).name
    return ("does not end" if name == "SIGXCPU" else reports[0] if reports else name), usage.ru_utime


def serve(library: Path, numbers: Iterable[int]) -> None:
    """In a process of its own: print what notices each mutant, as one line of JSON each."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # new tensors are not empty but full of one value
    simt = load(library)
    _simt_ops._simt = simt
    mutant = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "dcut_mutant")
    steps = [Step.of(case) for case in step_cases()]
    found, seconds = in_child(simt, steps, 300)
    assert found is None, found
    for number in numbers:
        mutant.value = number
        found, _ = in_child(simt, steps, int(5 + 2 * seconds))
        print(json.dumps((number, found)), flush=True)


# The race detector notices a missing barrier first, the sanitizers a missing check; the other tries what is left.
ORDER = {"barrier": ("hooked", "sanitized"), "check": ("sanitized", "hooked"), "range": ("sanitized", "hooked")}


def start(library: Path, numbers: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "python_tests.mutation", "--serve", str(library), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=sanitizer_environment(), cwd=ROOT)


def run(mutants: list[Mutant]) -> dict[int, tuple[str, str]]:
    """By number of those that are noticed: the build, and what it says."""
    folder = CACHE / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    enumerate_mutants(folder)
    libraries = {name: compile_module(BUILDS[name], folder) for name in ("sanitized", "hooked")}
    caught: dict[int, tuple[str, str]] = {}
    for attempt in range(2):
        open_ = [mutant for mutant in mutants if mutant.number not in caught]
        processes = {}
        for name, library in libraries.items():
            numbers = [mutant.number for mutant in open_ if ORDER[mutant.kind][attempt] == name]
            if numbers:
                processes[name] = start(library, numbers)
        for name, process in processes.items():
            assert process.stdout is not None
            for line in process.stdout:
                number, found = json.loads(line)
                print(f"{number}: {name} {found}", file=sys.stderr, flush=True)
                if found:
                    caught[number] = name, found
            assert process.wait() == 0
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="regular expression on place and text")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve[0]), map(int, options.serve[1:]))
        return 0
    mutants = [m for m in enumerate_mutants() if not options.only or re.search(options.only, str(m))]
    caught = run(mutants)
    survivors = 0
    for mutant in mutants:
        build, found = caught.get(mutant.number, ("", ALLOWED.get((mutant.place.split(":")[0], mutant.text), "")))
        survivors += not found
        print(f"{mutant.kind:7} {mutant}\n        {build or 'nobody'}: {found or 'SURVIVED'}")
    print(f"{len(mutants)} mutants, {len(caught)} noticed, {survivors} survivors without explanation")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
