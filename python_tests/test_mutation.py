"""A barrier or a bounds check that is taken out of the CUDA kernels is noticed; `mutation.py` tries all of them."""

from __future__ import annotations

import shutil

import pytest

from dcut_kernels import _load
from python_tests.simt_build import HEADERS

if _load.missing("simt") or _load.missing("cpu") or shutil.which("g++") is None:
    pytest.skip("needs the compiled library, the emulated CUDA kernel and g++", allow_module_level=True)
from python_tests.mutation import enumerate_mutants, instrument, run

MUTANTS = enumerate_mutants()
SAMPLE = {
    "select.cuh": "group.sync()",  # counts of the ranks are complete
    "bucket_argmax.cuh": "__syncthreads()",  # gains of all warps are there
    "write.cuh": "position >= t.max_blocks * size",
    "rows.cuh": "slot < rows.slots",
}
CHECKS = {
    *("i >= active", "slot >= 0", "slot < rows.slots", "p > 0", "p <= rows.draft_len", "at + 4 <= drafts"),
    *(
        "at + 1 < drafts",
        "first + g < n",
        "lane() >= n",
        "lane() < gained",
        "r < buckets.count",
        "at < out.rows.capacity - j",
    ),
    *("position < 0", "position >= t.max_blocks * size", "id < 0", "i < rows.batch", "lane() < warps()", "exists(j)"),
    *("clamp(__ldg(rows.num_reqs), 0, rows.batch)", "clamp(__ldg(rows.draft_lens + i), 0, row.drafts)"),
}


def test_every_barrier_is_found() -> None:
    text = "".join(path.read_text() for path in HEADERS.rglob("*.cuh") if path.name != "shim.cuh")
    calls = ("__syncthreads();", "__syncthreads_or(", "__syncwarp();", "cluster_sync();", "group.sync();")
    barriers = [mutant for mutant in MUTANTS if mutant.kind == "barrier"]
    assert len(barriers) == sum(map(text.count, calls)) >= 18


def test_known_checks_are_found() -> None:
    assert CHECKS - {mutant.text for mutant in MUTANTS} == set()


def test_how_a_check_is_taken_out() -> None:
    source = "if (a < b && f(c, d >= e)) return;\nx = (y > z || w) ? clamp(p, 0, q) : 0;  // n < m\n"
    changed, mutants = instrument("x.cuh", source, 5)
    assert [str(mutant) for mutant in mutants] == [
        "x.cuh:1: a < b -> true",
        "x.cuh:1: d >= e -> true",
        "x.cuh:2: y > z -> false",
        "x.cuh:2: clamp(p, 0, q) -> (p)",
    ]
    assert "if ((dcut_is(5) ? true : bool(a < b)) && f(c, (dcut_is(6) ? true : bool(d >= e)))) return;" in changed
    assert "(dcut_is(8) ? (p) : clamp(p, 0, q))" in changed


def test_a_sample_is_noticed() -> None:
    sample = []
    for name, text in SAMPLE.items():
        sample.append(next(m for m in MUTANTS if m.place.startswith(f"{name}:") and m.text == text))
    caught = run(sample)
    assert set(caught) == {mutant.number for mutant in sample}, caught
