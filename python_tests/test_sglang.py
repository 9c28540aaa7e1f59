"""The SGLang adapter gives what SGLang's DSpark worker takes, by signatures and shapes recorded from its sources."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from dcut_kernels.cost import CostTable, PaperRatios
from dcut_kernels.integration.sglang import REMEMBERED, SIGNATURES, RaggedVerify, check
from dcut_kernels.planner import Planner

RECORD = json.loads((Path(__file__).parent / "data" / "sglang_signatures.json").read_text(encoding="utf-8"))
OBJECTS = {entry["name"]: entry for entry in RECORD["objects"]}
ROWS, GAMMA, POOL, CONTEXT = 8, 5, 11, 64
GRID = (6, 12, 24, 48)


def made(signature: str, name: str, kind: str) -> object:
    """A class that keeps its arguments, or a function, of a recorded signature."""
    head, keep = (f"__init__(self, {signature[1:]}", "vars(self).update(locals())") if kind == "class" else (
        f"{name}{signature}", "raise NotImplementedError"
    )  # fmt: skip
    scope: dict = {}
    exec(f"def {head}:\n    {keep}", scope)
    return type(name, (), {"__init__": scope["__init__"]}) if kind == "class" else scope[name]


def install(monkeypatch: pytest.MonkeyPatch, version: int = -1, **changed: str) -> None:
    """Modules in place of SGLang's; `changed` gives other signatures by the last part of a name, "" leaves it out."""
    for full, entry in OBJECTS.items():
        module_name, _, path = full.partition(":")
        module = types.ModuleType(module_name)
        signatures = list(entry["signatures"].values())
        *owner, name = path.split(".")
        signature = changed.get(name, signatures[version % len(signatures)])
        if signature:
            found = made(signature, name, entry["kind"])
            for part in owner:
                found, name = type(part, (), {name: found}), part
            setattr(module, name, found)
        monkeypatch.setitem(sys.modules, module_name, module)


def planner(**options: object) -> Planner:
    table = CostTable(
        (1, ROWS), ((4.0, 4.2, 4.4, 9.0), (5.0, 6.0, 9.0, 30.0)), PaperRatios((0.25, 0.5, 0.75, 1.0), GAMMA)
    )
    return Planner(table, ROWS, GAMMA, **{"policy": "history", **options})


def inputs(rows: int, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "confidence": torch.rand(rows, GAMMA, generator=noise),
        "draft_block_ids": torch.randint(0, 1000, (rows, GAMMA), generator=noise),
        "draft_tokens": torch.randint(0, 1000, (rows, GAMMA), generator=noise),
        "prefix_lens": torch.randint(0, CONTEXT - GAMMA, (rows,), generator=noise),
        "req_pool_indices": torch.randperm(POOL, generator=noise)[:rows],
        "req_to_token": torch.randint(1, 5000, (POOL, CONTEXT), generator=noise, dtype=torch.int32),
    }


def arguments(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [given[name] for name in ("confidence", "draft_block_ids", "draft_tokens", "prefix_lens")]


def assert_recorded(values: dict[str, torch.Tensor], **sizes: int) -> None:
    for name, value in values.items():
        dtype, dims = RECORD["shapes"][name]
        expected = [sizes[dim.removesuffix("+1")] + dim.endswith("+1") for dim in dims.split()]
        assert (str(value.dtype), list(value.shape)) == (f"torch.{dtype}", expected), name


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("grid", [(), GRID], ids=["eager", "graphs"])
def test_steps_are_those_of_a_plain_loop(monkeypatch, grid, version) -> None:
    install(monkeypatch, version)
    adapter = RaggedVerify(planner(), grid)
    seen = set()
    for step in range(60):
        rows = 1 + step * 5 % ROWS
        given = inputs(rows, step)
        budget = adapter.token_budget(rows)
        batch = adapter.select([f"r{i}" for i in range(rows)], *arguments(given), budget)
        layout = adapter.layout(batch)
        window = adapter.window(batch, layout, given["req_pool_indices"], given["req_to_token"])

        keep, size = batch.keep_lens.tolist(), layout.graph_num_tokens
        ids, positions, slots, indptr = [], [], [], [0]
        for row, n in enumerate(keep):
            start, pool = int(given["prefix_lens"][row]), int(given["req_pool_indices"][row])
            ids += [int(given["draft_block_ids"][row, 0]), *given["draft_tokens"][row, :n].tolist()]
            positions += range(start, start + n + 1)
            slots += given["req_to_token"][pool, start : start + n + 1].tolist()
            indptr.append(len(ids))
        total, tail = len(ids), [0] * (size - len(ids))
        assert layout.verify_lens.tolist() == [n + 1 for n in keep]
        assert layout.qo_indptr_device.tolist() == batch.cu_seqlens.tolist() == indptr
        assert layout.extend_start_loc.tolist() == indptr[:-1]
        assert window.verify_ids.tolist() == ids + tail
        assert window.positions.tolist() == positions + tail
        assert window.verify_cache_loc.tolist() == slots + tail

        # the host knew the size: its budget is as fresh as can be on a CPU
        captured = [n for n in grid if n >= rows + budget]
        limit = grid[-1] if grid and not captured else rows + budget
        assert total == limit
        assert size == (min(captured, default=grid[-1]) if grid else total)
        on_host = (layout.verify_lens_cpu, layout.total_verify_tokens)
        assert on_host == ((None, None) if grid else ([n + 1 for n in keep], total))

        sizes = {"bs": rows, "gamma": GAMMA, "graph_num_tokens": size, "pool": POOL, "context": CONTEXT}
        assert_recorded(given, **sizes)
        assert_recorded({k: vars(layout)[k] for k in ("verify_lens", "extend_start_loc", "qo_indptr_device")}, **sizes)
        assert_recorded({k: vars(window)[k] for k in ("verify_ids", "positions", "verify_cache_loc")}, **sizes)
        seen.add((budget, tuple(keep)))
    assert len({budget for budget, _ in seen}) > 3
    assert any(0 < n < GAMMA for _, keep in seen for n in keep)


def test_what_it_fills_is_what_ragged_verification_reads(monkeypatch) -> None:
    install(monkeypatch)
    given = inputs(3, 1)
    adapter = RaggedVerify(planner(ids=torch.int32), GRID)
    batch = adapter.select("abc", *arguments(given), 4)
    layout = adapter.layout(batch)
    window = adapter.window(batch, layout, given["req_pool_indices"], given["req_to_token"])
    assert window.verify_ids.dtype == torch.int64
    signature = inspect.signature(
        sys.modules["sglang.srt.speculative.dspark_components.dspark_verify"].TargetVerifyExecutor._run_ragged
    )
    signature.bind(None, batch=None, layout=layout, ragged_window=window, sampling_info=None)


def test_a_stale_budget_cannot_outgrow_the_graph(monkeypatch) -> None:
    install(monkeypatch)
    adapter = RaggedVerify(planner(), GRID)
    for step in range(20):
        given = inputs(6, step)
        given["confidence"].fill_(0.999)
        batch = adapter.select("abcdef", *arguments(given), 2)  # the device would like more
        layout = adapter.layout(batch)
        assert int(layout.verify_lens.sum()) == layout.graph_num_tokens == 12
    assert adapter.token_budget(6) > 6


def test_the_host_budget_follows_the_rows_of_its_step() -> None:
    adapter = RaggedVerify(planner())
    assert adapter.token_budget(4) == 4 * GAMMA  # nothing is known yet
    host = adapter.planner.host_budget
    given = inputs(3, 0)
    adapter.select("abc", *arguments(given), 15)
    host.fill_(1 << 32 | 10)  # 10 tokens, of which 3 were anchors
    assert [adapter.token_budget(rows) for rows in (1, 2, 8)] == [5, 7, 7]
    host.fill_(1 << 32 | 2)
    assert adapter.token_budget(2) == 0
    host.fill_(1 << 32 | 2**31 - 1)
    assert adapter.token_budget(2) == 2 * GAMMA
    host.fill_(5 << 32 | 10)  # of a call that this adapter did not make
    assert adapter.token_budget(2) == 2 * GAMMA
    for _ in range(REMEMBERED):
        adapter.select("abc", *arguments(given), 15)
    host.fill_(1 << 32 | 10)  # long ago
    assert adapter.token_budget(2) == 2 * GAMMA
    host.fill_(2 << 32 | 10)
    assert adapter.token_budget(2) == 7


def test_sizes_of_steps_are_captured_ones() -> None:
    sizes = [RaggedVerify(planner(), grid).graph_tokens(3, 5) for grid in ((), (4, 8, 16), (4, 9), (4, 7))]
    assert sizes == [8, 8, 9, 7]
    assert RaggedVerify(planner()).graph_tokens(3, 99) == 3 + 3 * GAMMA


def test_a_planner_that_has_run_keeps_its_count(monkeypatch) -> None:
    install(monkeypatch)
    used = planner()
    used.next_budget[1] = -2  # 2^32 - 2 calls
    adapter, given = RaggedVerify(used), inputs(3, 0)
    for calls in (2**32 - 1, 0):
        adapter.select("abc", *arguments(given), 15)
        assert used.read_next().calls == calls
        assert adapter.token_budget(3) == used.read_next().tokens - 3


def test_errors() -> None:
    def message(call) -> str:
        with pytest.raises(ValueError, match="expected") as error:
            call()
        return str(error.value)

    assert message(lambda: RaggedVerify(planner(policy="argmax"))) == (
        "planner: expected policy 'history', got 'argmax'"
    )
    assert message(lambda: RaggedVerify(planner(), [8, 4])) == "grid: expected ascending sizes, got [8, 4]"
    assert message(lambda: RaggedVerify(planner(), [4]).graph_tokens(5, 0)) == (
        "rows: expected at most 4, the largest captured size, got 5"
    )


def test_the_adapter_was_written_for_the_recorded_signatures(monkeypatch) -> None:
    assert list(SIGNATURES) == list(OBJECTS)
    for version in (0, 1):
        install(monkeypatch, version)
        check()


WINDOW = "expected RaggedVerifyWindow of positions, verify_cache_loc, verify_ids, got "


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RaggedVerifyWindow": "(positions, verify_ids)"}, WINDOW + "positions, verify_ids"),
        (
            {"RaggedVerifyWindow": "(positions, verify_cache_loc, verify_ids, mask)"},
            WINDOW + "positions, verify_cache_loc, verify_ids, mask",
        ),
        ({"DFlashDraftInputV2": ""}, "expected sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2, got module"),
        (
            {"prepare_verify_budget": "(self, batch)"},
            "expected DSparkVerifyPlanner.prepare_verify_budget of self, batch, future_map, got self, batch",
        ),
    ],
    ids=["lost", "demanded", "gone", "method"],
)
def test_a_changed_sglang_is_refused(monkeypatch, changed, words) -> None:
    install(monkeypatch, **changed)
    with pytest.raises(RuntimeError) as error:
        check()
    assert str(error.value).startswith("sglang: " + words)
    assert ";" not in str(error.value)


def test_a_missing_sglang_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(RuntimeError) as error:
        check()
    assert str(error.value).startswith("sglang: expected ")
    assert [name for name in SIGNATURES if f"expected {name}, got " not in str(error.value)] == []


def test_importing_the_adapter_imports_no_sglang() -> None:
    names = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import sys, dcut_kernels.integration.sglang; print('sglang' in {names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_installed_sglang_is_the_expected_one() -> None:
    pytest.importorskip("sglang", reason="needs SGLang")
    check()
