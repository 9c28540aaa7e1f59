"""The four parts stand alone, and composed they are the fused operation bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcut_kernels import VerifyBatch, backends
from dcut_kernels.ops import Backend
from microbench.cases import BENCH, LISTED, Case, random_case
from python_tests.compare import assert_same, composed, pick, tensor_difference
from python_tests.fuzz import garbage

RANDOM = [random_case(seed, 20, 15) for seed in range(1000, 1150)]
SOME = [case for case in [*LISTED, *RANDOM] if case.batch * case.draft_len <= 2000]


@pytest.mark.parametrize("case", [*LISTED, *BENCH, *RANDOM], ids=str)
def test_composed_equals_fused(
    backend: Backend, reference: Callable[[Case], tuple[VerifyBatch, VerifyBatch]], case: Case
) -> None:
    fused = reference(case)[0] if backend.name == "reference" else backend.select_and_pack(**case.inputs)
    assert_same(composed(backend, case.inputs), fused)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_depths_of_each_bucket_are_those_of_its_budget(backend: Backend, case: Case) -> None:
    """Row r of `segmented_topk` is what the fused operation keeps when bucket r is the only one."""
    prefix = backend.log_prefix_sum(**pick(backend.log_prefix_sum, case.inputs))
    arguments = pick(backend.segmented_topk, case.inputs)
    depths = backend.segmented_topk(prefix, **arguments)
    assert depths.shape == (case.buckets, case.batch)
    active = case.inputs.get("num_reqs", torch.tensor([case.batch])).clamp(0, case.batch).item()
    budgets = case.inputs["budgets"]
    row = budgets if budgets.dim() == 1 else budgets[min(max(active, 1), len(budgets)) - 1]
    for r in range(0, case.buckets, max(1, case.buckets // 5)):
        alone = case.inputs | {"budget": row[r : r + 1].clone()}
        assert depths[r].tolist() == backend.select_and_pack(**alone).keep_lens.tolist()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_garbage_prefixes_are_repaired(backend: Backend, case: Case) -> None:
    """Any int32 is taken: rows that start below 0 have no drafts, values are clamped and made non-decreasing."""
    given = garbage(backend.log_prefix_sum(**pick(backend.log_prefix_sum, case.inputs)), case.batch)
    repaired = given.clamp(0, 2**26 - 1)
    if case.draft_len:
        repaired = repaired.cummax(1).values.masked_fill(given[:, :1] < 0, -1)
    assert_ranked_alike(backend, given, backend, repaired, case)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_parts_equal_reference_on_any_prefix(compiled: Backend, case: Case) -> None:
    reference = backends.get("reference")
    prefix = reference.log_prefix_sum(**pick(reference.log_prefix_sum, case.inputs))
    got = compiled.log_prefix_sum(**pick(compiled.log_prefix_sum, case.inputs))
    assert tensor_difference("prefix", got, prefix) is None
    for given in (prefix, garbage(prefix, case.batch)):
        assert_ranked_alike(compiled, given, reference, given, case)


def assert_ranked_alike(a: Backend, a_prefix: torch.Tensor, b: Backend, b_prefix: torch.Tensor, case: Case) -> None:
    arguments = pick(a.segmented_topk, case.inputs)
    depths = a.segmented_topk(a_prefix, **arguments), b.segmented_topk(b_prefix, **arguments)
    assert tensor_difference("depths", *depths) is None
    arguments = pick(a.bucket_argmax, case.inputs)
    both = zip(a.bucket_argmax(a_prefix, **arguments), b.bucket_argmax(b_prefix, **arguments), strict=True)
    for name, (got, expected) in zip(("decision", "gains"), both, strict=True):
        assert tensor_difference(name, got, expected) is None


@pytest.mark.parametrize("case", SOME, ids=str)
def test_any_depths_are_packed_alike(compiled: Backend, case: Case) -> None:
    """Given depths are clamped to the drafts of each row, padding rows and rows out of range keep none."""
    generator = torch.Generator().manual_seed(case.batch)
    depths = torch.randint(-2, case.draft_len + 3, (case.batch,), generator=generator, dtype=torch.int32)
    depths[::7] = 2**31 - 1
    arguments = pick(compiled.pack_prefixes, case.inputs)
    expected = backends.get("reference").pack_prefixes(depths, **arguments)
    assert_same(compiled.pack_prefixes(depths, **arguments), expected)
    slots, rows = case.inputs["draft_ids"].shape[0], case.inputs.get("row_index", torch.arange(case.batch))
    active = case.inputs.get("num_reqs", torch.tensor([case.batch]))
    exists = (rows >= 0) & (rows < slots) & (torch.arange(case.batch) < active)
    assert expected.keep_lens.tolist() == torch.where(exists, depths.clamp(0, case.draft_len), 0).tolist()


def test_a_second_cache_group_differs_only_in_its_slots(backend: Backend) -> None:
    case = next(case for case in LISTED if case.name == "block-size-16")
    first = backend.select_and_pack(**case.inputs)
    arguments = pick(backend.pack_prefixes, case.inputs) | {"block_table": case.inputs["block_table"] + 50}
    second = backend.pack_prefixes(first.keep_lens, **arguments)
    inside = first.slot_mapping >= 0
    assert inside.any()
    assert (second.slot_mapping == torch.where(inside, first.slot_mapping + 50 * 16, -1)).all()
    other = {"slot_mapping": first.slot_mapping, "decision": first.decision, "gains": first.gains}
    assert_same(second._replace(**other), first)
