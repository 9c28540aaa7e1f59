"""The judge finds nothing wrong with any backend, and finds every kind of wrong answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcut_kernels import VerifyBatch, backends
from dcut_kernels.ops import Backend
from microbench.build import int32
from microbench.cases import BENCH, LISTED, Case, make, random_case
from python_tests.compare import pick, poisoned
from python_tests.judge import Judge

RANDOM = [random_case(seed, 25, 16) for seed in range(2000, 2200)]


def assert_right(backend: Backend, case: Case) -> None:
    judge = Judge(case.inputs)
    assert judge.complaints(backend.select_and_pack(**case.inputs)) == []
    before = poisoned(case)
    assert judge.complaints(backend.select_and_pack(**case.inputs, out=poisoned(case)), before) == []


@pytest.mark.parametrize("case", [c for c in (*LISTED, *BENCH, *RANDOM) if "calibration" not in c.inputs], ids=str)
def test_promises(backend: Backend, case: Case) -> None:
    assert_right(backend, case)


UNIT_FLOATS = st.floats(0, 1, width=32) | st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.9, 1 - 2.0**-24])
ANY_FLOATS = st.floats(width=32) | UNIT_FLOATS
INTS = st.integers(-2, 20) | st.sampled_from([-(2**31), 2**31 - 1])


def column(size: int, value: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(value, min_size=size, max_size=size)


def around(top: int) -> st.SearchStrategy:
    """Mostly from 0 to `top`, now and then any integer."""
    return st.integers(0, 9).flatmap(lambda n: st.integers(0, top) if n else INTS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call with up to 6 requests of up to 6 drafts."""
    size = st.sampled_from([3, 4, 5, 6, 2, 1, 0])
    slots, draft_len = draw(size), draw(size)
    log = draw(st.booleans())
    few = st.lists(UNIT_FLOATS, min_size=1, max_size=3)  # few values give many ties
    values = draw(st.sampled_from([st.sampled_from(draw(few)), UNIT_FLOATS, ANY_FLOATS]))
    if log:
        values = values.map(lambda c: math.log(c) if c > 0 else c)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    confidence = torch.tensor(draw(column(slots * draft_len, values)), dtype=torch.float32)

    def optional(value: st.SearchStrategy) -> Any:
        return draw(value) if draw(st.integers(0, 3)) == 3 else None

    row_index = optional(st.lists(around(max(slots - 1, 0)), max_size=7))
    batch = slots if row_index is None else len(row_index)
    drafts, blocks = column(batch, around(draft_len)), draw(st.integers(0, 3))
    table, base_lens = optional(column(batch, column(blocks, around(99)))), optional(column(batch, around(9)))
    options = {
        "row_index": row_index,
        "draft_lens": optional(drafts),
        "min_keep": optional(drafts),
        "max_keep": optional(drafts),
        "weight": optional(column(batch, st.sampled_from([1.0, 0.5, 0.3]) | ANY_FLOATS)),
        "base_lens": base_lens,
        "capacity": None if base_lens is None else draw(st.integers(batch, batch * 12 + 3)),
        "num_reqs": optional(column(1, around(batch))),
        "block_table": None if table is None else int32(table).reshape(batch, blocks),
        "block_size": None if table is None else draw(st.integers(1, 20)),
        "budget": optional(around(batch * (draft_len + 1))),
        "score": optional(st.just("shifted")),
        "count_bonus": optional(st.just(False)),
        "log_confidence": log or None,
        "pad_token": optional(st.integers(-5, 5)),
        "seq_lens": torch.tensor(draw(column(batch, around(70))), dtype=torch.int64),
        "ids": draw(st.sampled_from([torch.int32, torch.int64])),
    }
    buckets, rows = draw(st.integers(0, 9)), draw(st.integers(1, 8))
    costs = draw(st.sampled_from([st.just(1.0), st.floats(0.5, 9, width=32), ANY_FLOATS]))
    tables = [
        draw(column(rows, column(buckets, value))) if draw(st.booleans()) else draw(column(buckets, value))
        for value in (around(batch * (draft_len + 1)), costs)
    ]
    options = {name: value for name, value in options.items() if value is not None}
    return make("drawn", confidence.reshape(slots, draft_len).to(dtype), *tables, **options)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_promises_of_drawn_cases(backend: Backend, case: Case) -> None:
    assert_right(backend, case)


SCENE = make(
    "scene", [[0.9, 0.8, 0.7, 0.1], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.99, 0.3, 0.3, 0.3]],
    [4, 9, 12, 20], [4, 7, 9.7, 20], block_table=[[3, 4], [5, 6], [7, 8], [9, 1]], block_size=16,
    seq_lens=torch.tensor([3, 14, 30, 0]), pad_token=-1, row_index=[0, 1, 2, 3], min_keep=[0, 0, 0, 0],
)  # fmt: skip


def answer(**options: Any) -> VerifyBatch:
    return backends.get("reference").select_and_pack(**{**SCENE.inputs, **options})


def repacked(case: Case, keep: list[int]) -> VerifyBatch:
    """The answer with other keep depths, packed without a mistake."""
    reference = backends.get("reference")
    right = reference.select_and_pack(**case.inputs)
    packed = reference.pack_prefixes(int32(keep), **pick(reference.pack_prefixes, case.inputs))
    return packed._replace(decision=right.decision, gains=right.gains)


def worse_bucket() -> VerifyBatch:
    return repacked(SCENE, [3, 2, 2, 1])._replace(decision=int32([2, 12, 12, 12]))


def changed(result: VerifyBatch, field: str, at: int, by: int = 1) -> VerifyBatch:
    tensor = getattr(result, field).clone()
    tensor[at] += by
    return result._replace(**{field: tensor})


def test_the_scene() -> None:
    """Where the wrong answers below start: scores .99 .9 .72 .504 .5 are kept, the tied .5 of request 2 is pruned."""
    right = answer()
    assert right.decision.tolist() == [1, 9, 9, 9]
    assert right.keep_lens.tolist() == [3, 1, 0, 1]
    assert Judge(SCENE.inputs).complaints(right) == []


WRONG: dict[str, tuple[str, Callable[[VerifyBatch], VerifyBatch]]] = {
    "tie given to the later request": ("ties: pruned draft 1 of request 1", lambda r: repacked(SCENE, [3, 0, 1, 1])),
    "tie given to the later position": ("order: kept draft 2 of request 3", lambda r: repacked(SCENE, [3, 0, 0, 2])),
    "worse draft kept": ("order: kept draft 4 of request 0", lambda r: repacked(SCENE, [4, 0, 0, 1])),
    "one draft too many": ("keep_lens: 10 tokens in all", lambda r: repacked(SCENE, [3, 1, 1, 1])),
    "one draft too few": ("keep_lens: 8 tokens in all", lambda r: repacked(SCENE, [3, 0, 0, 1])),
    "deeper than there are drafts": ("keep_lens[0]: 5 is not within", lambda r: changed(r, "keep_lens", 0, 2)),
    "budget off by one": ("decision: ", lambda r: changed(r, "decision", 1)),
    "total off by one": ("decision: ", lambda r: changed(r, "decision", 2)),
    "padded total off by one": ("decision: ", lambda r: changed(r, "decision", 3)),
    "worse bucket": ("decision: [2, ", lambda r: worse_bucket()),
    "gain too large": ("gains[3]: ", lambda r: changed(r, "gains", 3, int(r.gains[3]) >> 14)),
    "gain too small": ("gains[0]: ", lambda r: changed(r, "gains", 0, -int(r.gains[0]) >> 14)),
    "offset": ("cu_seqlens[2]: ", lambda r: changed(r, "cu_seqlens", 2)),
    "offset after the last row": ("cu_seqlens[4]: ", lambda r: changed(r, "cu_seqlens", 4)),
    "cache length": ("kv_lens[1]: ", lambda r: changed(r, "kv_lens", 1)),
    "token": ("token_ids[2]: ", lambda r: changed(r, "token_ids", 2)),
    "token in the tail": ("token_ids[19]: ", lambda r: changed(r, "token_ids", 19)),
    "position": ("positions[5]: ", lambda r: changed(r, "positions", 5)),
    "position in the tail": ("positions[9]: ", lambda r: changed(r, "positions", 9)),
    "request": ("request_ids[3]: ", lambda r: changed(r, "request_ids", 3)),
    "request in the tail": ("request_ids[9]: ", lambda r: changed(r, "request_ids", 9)),
    "cache slot": ("slot_mapping[6]: ", lambda r: changed(r, "slot_mapping", 6)),
    "cache slot in the tail": ("slot_mapping[12]: ", lambda r: changed(r, "slot_mapping", 12)),
    "draft index": ("draft_index[1]: ", lambda r: changed(r, "draft_index", 1)),
    "draft index of a bonus token": ("draft_index[0]: ", lambda r: changed(r, "draft_index", 0)),
    "verified position": ("logits_indices[8]: ", lambda r: changed(r, "logits_indices", 8)),
    "verified position in the tail": ("logits_indices[9]: ", lambda r: changed(r, "logits_indices", 9)),
    "type of the ids": ("token_ids: torch.int64", lambda r: r._replace(token_ids=r.token_ids.long())),
    "missing bucket": ("gains: torch.int64 (3,)", lambda r: r._replace(gains=r.gains[:3])),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_judge_rejects(kind: str) -> None:
    complaint, doctor = WRONG[kind]
    found = Judge(SCENE.inputs).complaints(doctor(answer()))
    assert any(c.startswith(complaint) for c in found), found


def test_judge_rejects_a_disabled_bucket() -> None:
    inputs = SCENE.inputs | {"costs": torch.tensor([4, math.nan, 9.7, 20])}
    found = Judge(inputs).complaints(answer())
    assert any(c.startswith("decision: [1, ") for c in found), found


def test_judge_rejects_the_later_of_equal_buckets() -> None:
    inputs = SCENE.inputs | {"budgets": SCENE.inputs["budgets"][[1, 1]], "costs": torch.ones(2)}
    right = answer(budgets=inputs["budgets"], costs=inputs["costs"])
    found = Judge(inputs).complaints(changed(right, "decision", 0))
    assert any(c.startswith("decision: [1, ") for c in found), found


def test_judge_rejects_a_floor_that_was_not_kept() -> None:
    inputs = SCENE.inputs | {"min_keep": int32([0, 0, 2, 0])}
    found = Judge(inputs).complaints(answer())
    assert found == ["keep_lens[2]: 0 is not within 2 and 4"]


def test_judge_rejects_a_padding_row_that_keeps_drafts() -> None:
    inputs = SCENE.inputs | {"num_reqs": int32([3])}
    assert Judge(inputs).complaints(answer()) == ["keep_lens[3]: 1 is not within 0 and 0"]


def test_judge_rejects_overwritten_base_tokens() -> None:
    case = next(case for case in LISTED if case.name == "base-lens")
    out = backends.get("reference").select_and_pack(**case.inputs, out=poisoned(case))
    judge = Judge(case.inputs)
    assert judge.complaints(out, poisoned(case)) == []
    base = int(out.cu_seqlens[1])
    found = judge.complaints(changed(out, "token_ids", base), poisoned(case))
    assert [c.split(":")[0] for c in found] == [f"token_ids[{base}]"]


def test_judge_tells_a_score_of_zero_from_a_small_one() -> None:
    """Above 2^-56 the order counts, below it only the position does."""
    case = make("small", [[2.0**-54, 0.5], [2.0**-58, 0.5], [0, 1]], [4])
    assert backends.get("reference").select_and_pack(**case.inputs).keep_lens.tolist() == [1, 0, 0]
    for request, depths in ((1, [0, 1, 0]), (2, [0, 0, 1])):
        found = Judge(case.inputs).complaints(repacked(case, depths))
        assert any(c.startswith(f"order: kept draft 1 of request {request}") for c in found), found


def test_judge_allows_what_is_promised_and_no_more() -> None:
    """Scores a hair apart may swap, scores 2^-13 apart may not."""
    for gap, allowed in ((2.0**-15, True), (2.0**-13, False)):
        case = make("close", [[0.7], [0.7 * (1 - gap)]], [3])
        assert (Judge(case.inputs).complaints(repacked(case, [0, 1])) == []) == allowed
