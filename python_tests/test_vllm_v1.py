"""vLLM's V1 runner: what is refused, what is left alone, and steps that an engine seldom takes, on a stand-in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

import prometheus_client
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from dcut_kernels.cost import CostTable, TokenCounts
from dcut_kernels.integration import vllm as plugin
from dcut_kernels.integration.vllm import costs as costs_module
from dcut_kernels.integration.vllm import metrics, v1, workers
from dcut_kernels.integration.vllm.costs import cost_table
from dcut_kernels.integration.vllm.options import Options

ROWS, K = 4, 5
WARM_UP = "compile_or_warm_up_model"


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """vLLM as it was imported; collects what is logged."""
    lines: list[str] = []
    monkeypatch.setattr(v1.logger, "warning", lambda text, *values: lines.append(text % values))
    for owner, names in (
        (WorkerWrapperBase, (WARM_UP, "init_device")),
        (Scheduler, ("update_draft_token_ids", "make_stats")),
        (SpecDecodingProm, ("observe",)),
        (PrometheusStatLogger, ("__init__",)),
    ):
        for name in names:
            original = getattr(owner, name, None)
            original = getattr(original, "__wrapped__", original)
            monkeypatch.setattr(owner, name, original or (lambda self: self.worker.compile_or_warm_up_model()), False)
    return lines


class Drafter:
    """Half a proposer of vLLM: one head for all positions, or one call for each."""

    _enable_probabilistic_draft_probs = use_local_argmax_reduction = use_heterogeneous_vocab = False
    _greedy_sample = SpecDecodeBaseProposer._greedy_sample

    def __init__(self, logits: torch.Tensor, calls: int = 1) -> None:
        self.logits, self.calls, self.probabilities = logits, calls, None  # logits [B, K, V]
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.logits.reshape(-1, logits.shape[-1])[hidden])

    def propose(self) -> torch.Tensor:
        rows = torch.arange(self.logits.shape[0] * self.logits.shape[1]).view(self.logits.shape[:2])
        steps = [rows.flatten()] if self.calls == 1 else list(rows.T)
        found = [self._greedy_sample(step) for step in steps]
        return found[0].view(rows.shape) if self.calls == 1 else torch.stack(found, 1)

    def take_last_draft_probs(self) -> torch.Tensor | None:
        return self.probabilities


class Runner(GPUModelRunner):
    """What `Trimmer` sees of a runner."""

    def __init__(self, drafter: Any, method: str = "dflash") -> None:
        self.speculative_config = SimpleNamespace(method=method)
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
        self.drafter, self.use_async_scheduling, self.num_spec_tokens, self.max_num_reqs = drafter, False, K, ROWS
        self.discard_request_mask = SimpleNamespace(np=np.zeros(ROWS, bool))
        self.requests = {
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(max_tokens=100), output_token_ids=[1], prev_num_draft_len=0
            )
            for name in "abcd"
        }
        self.drafts: torch.Tensor | None = None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None if self.drafts is None else DraftTokenIds(list(self.requests), self.drafts.tolist())


@pytest.fixture
def costs(tmp_path: Path) -> Options:
    """Options with a table whose cost is flat, up to 12 tokens, and steep beyond."""
    path = tmp_path / "costs.json"
    CostTable((1, 4), ((1.0, 1.01, 9.0),) * 2, TokenCounts((4, 12, 24))).save(path)
    return Options(costs=str(path))


def logits(rows: int = ROWS, drafts: int = K) -> torch.Tensor:
    return torch.randn(rows, drafts, 32, generator=torch.Generator().manual_seed(3)) * 3


@pytest.fixture(params=[1, K], ids=["one call", "a call for each position"])
def trimmer(request: pytest.FixtureRequest, costs: Options) -> v1.Trimmer:
    runner = Runner(Drafter(logits(), request.param))
    made = v1.Trimmer(runner, costs)
    made.attach()
    return made


def kept(trimmer: v1.Trimmer) -> list[int]:
    taken = trimmer.runner.take_draft_token_ids()
    for row, left in zip(trimmer.runner.drafts.tolist(), taken.draft_token_ids, strict=True):
        assert row[: len(left)] == left
    assert taken.kept == sum(map(len, taken.draft_token_ids))
    return [len(row) for row in taken.draft_token_ids]


def test_keeps_the_most_likely_prefixes(trimmer: v1.Trimmer) -> None:
    trimmer.runner.drafts = trimmer.runner.drafter.propose()
    probabilities = logits().softmax(-1).max(-1)
    assert trimmer.runner.drafts.tolist() == probabilities.indices.tolist()
    survival = probabilities.values.cumprod(1)
    best = survival.flatten().topk(8).indices // K  # 12 tokens, 4 of which are bonus tokens
    assert kept(trimmer) == torch.bincount(best, minlength=ROWS).tolist()


def test_drawn_drafts_are_ranked_by_their_own_probability(costs: Options) -> None:
    drafter = Drafter(logits())
    drafter._enable_probabilistic_draft_probs = True
    trimmer = v1.Trimmer(Runner(drafter), costs)
    trimmer.attach()
    assert (trimmer.planner.policy, trimmer.planner.score) == ("early_stop", "shifted")
    drafter.probabilities = logits().softmax(-1)
    drafts = torch.arange(ROWS * K).view(ROWS, K)  # as drawn, not the most likely ones
    trimmer.propose = lambda: drafts
    trimmer.proposed()
    assert torch.equal(trimmer.confidence, drafter.probabilities.gather(-1, drafts[..., None])[..., 0])


def test_biased_options_are_refused(costs: Options) -> None:
    drafter = Drafter(logits())
    drafter._enable_probabilistic_draft_probs = True
    with pytest.raises(ValueError, match="early_stop"):
        v1.Trimmer(Runner(drafter), Options(policy="argmax", costs=costs.costs))


def test_requests_with_little_room(trimmer: v1.Trimmer) -> None:
    """None in a prompt, none beyond ``max_tokens``, any number without a limit."""
    runner = trimmer.runner
    runner.discard_request_mask.np[0] = True
    runner.requests["b"].sampling_params.max_tokens = 3  # one is out, the next step adds one of its own
    runner.requests["c"].sampling_params.max_tokens = 1
    runner.requests["d"].sampling_params = None
    assert [trimmer.room(row, name) for row, name in enumerate("abcd")] == [0, 1, 0, K]
    runner.drafts = runner.drafter.propose()
    assert kept(trimmer) == [0, 1, 0, K]


def test_nothing_drafted(trimmer: v1.Trimmer) -> None:
    """No drafts, zeros in place of drafts, fewer positions than usual, and rows that do not fit."""
    runner = trimmer.runner
    assert runner.take_draft_token_ids() is None
    runner.drafts = torch.zeros(ROWS, K, dtype=torch.int64)
    assert sum(kept(trimmer)) == 0
    runner.drafter.logits = logits(drafts=2)
    runner.drafts = runner.drafter.propose()
    assert 0 < sum(kept(trimmer)) <= 8
    runner.drafts, trimmer.confidence = torch.zeros(ROWS, K, dtype=torch.int64), torch.ones(3, K)
    assert type(runner.take_draft_token_ids()) is DraftTokenIds


def test_what_is_learned(costs: Options) -> None:
    """A request that was preempted teaches nothing, one with a grammar only of drafts that it allowed."""
    runner = Runner(object(), "ngram")
    trimmer = v1.Trimmer(runner, Options(costs=costs.costs, floor=K, floor_every=1))
    trimmer.attach()
    runner.drafts = torch.ones(ROWS, K, dtype=torch.int64)
    assert kept(trimmer) == [K] * ROWS
    for name, verified, more in (("a", 5, 4), ("b", 5, 1), ("c", 2, 3), ("d", 5, 0)):
        runner.requests[name].prev_num_draft_len = verified
        runner.requests[name].output_token_ids += [7] * more
    kept(trimmer)
    assert trimmer.rates.seen.tolist() == [3, 2, 1, 1, 0]
    assert trimmer.rates.accepted.tolist() == [2, 2, 1, 0, 0]
    assert trimmer.planner.metrics.accepted == 5
    assert trimmer.planner.metrics.drafts == 3 * K


def test_requests_come_and_go(trimmer: v1.Trimmer) -> None:
    runner = trimmer.runner
    runner.drafts = runner.drafter.propose()
    kept(trimmer)
    runner.requests["new"] = runner.requests.pop("a")
    runner.drafts = runner.drafter.propose()
    kept(trimmer)
    assert set(trimmer.planner.metrics.requests) == {"b", "c", "d", "new"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config": None}, "speculative_config: expected one, got none"),
        ({"use_async_scheduling": True}, "async_scheduling: expected False"),
        ({"pipeline": 2}, "pipeline_parallel_size: expected 1, got 2"),
        ({"data": 2}, "data_parallel_size: expected 1, or a table in costs, got 2"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction: expected False"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab: expected False"),
        ({"drafter": SimpleNamespace(propose=None)}, "_greedy_sample: expected that of all proposers, got its own"),
    ],
)
def test_obstacles(change: dict[str, Any], reason: str, warnings: list[str]) -> None:
    """One line says why, and the runner stays as it is."""
    workers.install()
    runner = Runner(Drafter(logits()))
    for name, value in change.items():
        if name in ("pipeline", "data"):
            setattr(runner.parallel_config, f"{name}_parallel_size", value)
        else:
            setattr(runner.drafter if name.startswith("use_") and "async" not in name else runner, name, value)
    started(runner, {"dcut": True})
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert not {"dcut", "take_draft_token_ids"} & set(vars(runner))


def started(runner: Any, config: Any) -> Any:
    """What the executor calls when a worker is to warm up."""
    wrapper = WorkerWrapperBase()
    wrapper.worker = SimpleNamespace(model_runner=runner, compile_or_warm_up_model=lambda: "times")
    wrapper.vllm_config = SimpleNamespace(additional_config=config)
    assert getattr(wrapper, WARM_UP)() == "times"
    return runner


def other_sample(self: Any, hidden_states: torch.Tensor, temperature: float) -> None:
    """As another vLLM may have it."""


def test_changed_signatures_are_an_obstacle(monkeypatch: pytest.MonkeyPatch, costs: Options) -> None:
    runner = Runner(Drafter(logits()))
    assert v1.obstacle(runner, costs) is None
    monkeypatch.setattr(Drafter, "_greedy_sample", lambda self, hidden_states: None)
    assert "_greedy_sample: expected that of all proposers" in v1.obstacle(runner, costs)
    for owner in (Drafter, SpecDecodeBaseProposer):
        monkeypatch.setattr(owner, "_greedy_sample", other_sample)
    assert "expected parameters hidden_states, got hidden_states temperature" in v1.obstacle(runner, costs)
    monkeypatch.undo()
    for name in v1.RUNNER:
        monkeypatch.setattr(Runner, name, lambda self, other: None)
        assert v1.obstacle(runner, costs).startswith(f"{name}: expected parameters"), name
        monkeypatch.undo()


def test_switched_on_and_off(costs: Options, warnings: list[str]) -> None:
    workers.install()
    for config in ({}, None, {"dcut": False}):
        assert "dcut" not in vars(started(Runner(Drafter(logits())), config))
    assert "dcut" in vars(started(Runner(Drafter(logits())), {"dcut": {"costs": costs.costs}}))
    assert "dcut" not in vars(started(SimpleNamespace(), {"dcut": True}))  # another runner's part
    assert started(None, {"dcut": True}) is None
    assert warnings == []


def test_a_second_warm_up_changes_nothing(costs: Options) -> None:
    workers.install()
    runner = started(Runner(Drafter(logits())), {"dcut": {"costs": costs.costs}})
    first = vars(runner).copy()
    assert vars(started(runner, {"dcut": {"costs": costs.costs}})) == first


def test_options_are_refused_before_a_runner_is_made() -> None:
    workers.install()
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = SimpleNamespace(additional_config={"dcut": {"floor": -1}})
    with pytest.raises(ValueError, match="dcut: floor: expected an int from 0 on, got -1"):
        wrapper.init_device()


def test_another_worker_is_left_alone(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self, device: None)
    workers.install()
    assert not hasattr(WorkerWrapperBase.init_device, "dcut")
    assert "init_device: expected parameters none, got device" in warnings[0]


def test_a_worker_that_warms_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerWrapperBase, WARM_UP, lambda self: "its own times")
    workers.install()
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = SimpleNamespace(additional_config={})
    assert getattr(wrapper, WARM_UP)() == "its own times"


def test_a_wrapper_that_hands_on_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch, costs: Options) -> None:
    monkeypatch.delattr(WorkerWrapperBase, WARM_UP)
    workers.install()
    assert "dcut" in vars(started(Runner(Drafter(logits())), {"dcut": {"costs": costs.costs}}))


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_a_runner_that_is_unlike_any_known(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def attach(runner: Any, options: Options) -> None:
        raise error("it is not there")

    workers.install()
    monkeypatch.setattr(v1, "attach", attach)
    started(Runner(Drafter(logits())), {"dcut": True})
    text = "dcut: not used, drafts are verified in full: this vLLM is another one: it is not there"
    assert warnings == [text]


def test_a_vllm_without_the_other_runner(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: "made")
    workers.install()
    monkeypatch.delattr(plugin, "v2", raising=False)
    monkeypatch.setitem(sys.modules, f"{plugin.__name__}.v2", None)
    wrapper = WorkerWrapperBase()
    for config, lines in ({}, 0), ({"dcut": True}, 1):
        wrapper.vllm_config = SimpleNamespace(additional_config=config)
        assert wrapper.init_device() == "made"
        assert len(warnings) == lines
    assert "dcut: no part for the V2 runner with this vLLM: " in warnings[0]


def test_a_drafter_without_a_head(costs: Options, warnings: list[str]) -> None:
    """Nothing is known of its drafts, and none is pruned for that."""
    runner = Runner(Drafter(logits()))
    trimmer = v1.Trimmer(runner, costs)
    trimmer.attach()
    trimmer.propose = lambda: torch.zeros(ROWS, K, dtype=torch.int64)
    for _ in range(2):
        runner.drafts = runner.drafter.propose()
        assert sum(kept(trimmer)) == 8
    assert warnings == ["dcut: the drafter does not use its head, all drafts count as certain"]


def test_installing_twice_is_installing_once() -> None:
    plugin.register()
    seams = [(WorkerWrapperBase, WARM_UP), (Scheduler, "make_stats"), (SpecDecodingProm, "observe")]
    once = [getattr(owner, name) for owner, name in seams]
    plugin.register()
    assert once == [getattr(owner, name) for owner, name in seams]
    assert not any(hasattr(function.__wrapped__, "dcut") for function in once)


def test_a_vllm_without_a_module(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(plugin, "PARTS", ("gone", "metrics"))
    plugin.register()
    assert len(warnings) == 1
    assert "no gone with this vLLM: No module named" in warnings[0]
    assert hasattr(Scheduler.make_stats, "dcut")


def test_metrics_of_a_changed_vllm(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(Scheduler, "make_stats", lambda self, stats: None)
    metrics.install()
    assert not hasattr(Scheduler.make_stats, "dcut")
    assert "Scheduler.make_stats: expected parameters ... spec_decoding_stats, got stats" in warnings[0]


def test_counts_wait_for_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go with the next statistics of speculation, whatever number of steps has gone by."""
    passed: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "update_draft_token_ids", lambda self, draft_token_ids: passed.append(draft_token_ids)
    )
    metrics.install()
    scheduler: Any = object.__new__(Scheduler)
    scheduler.requests, scheduler.log_stats = {}, True
    for kept, drafts, bucket in (3, 10, 16), (4, 8, 16), (0, 6, 4):
        scheduler.update_draft_token_ids(metrics.Trimmed([], [], kept, drafts, bucket))
    scheduler.log_stats = False
    scheduler.update_draft_token_ids(metrics.Trimmed([], [], 100, 100, 100))
    assert [step.kept for step in passed] == [3, 4, 0, 100]
    stats = SpecDecodingStats.new(K)
    assert scheduler.make_stats(None) is None
    assert scheduler.make_stats(stats) is None
    sent = stats.num_draft_tokens_per_pos
    assert sent[:K] == [0] * K
    assert dict(zip(sent[K::2], sent[K + 1 :: 2], strict=True)) == {metrics.KEPT: 7, metrics.PRUNED: 17, 16: 2, 4: 1}
    following = SpecDecodingStats.new(K)
    scheduler.make_stats(following)
    assert following.num_draft_tokens_per_pos == [0] * K
    assert not hasattr(exporter({"dcut": True}, speculates=False).spec_decoding_prom, "dcut")
    exporters = [exporter(config) for config in ({"dcut": True}, {}, {"dcut": True})]  # the last one's replace others
    assert [hasattr(each.spec_decoding_prom, "dcut") for each in exporters] == [True, False, True]
    for each in exporters:
        each.spec_decoding_prom.observe(SpecDecodingStats.new(K), 1)
        each.spec_decoding_prom.observe(stats, 1)
    found = {}
    for metric in prometheus_client.REGISTRY.collect():
        for sample in metric.samples if metric.name.startswith("vllm:dcut") else ():
            if sample.name.endswith("_total") and sample.value:
                found[sample.name, sample.labels["engine"], sample.labels.get("bucket")] = sample.value
    assert found == {
        ("vllm:dcut_num_kept_draft_tokens_total", "1", None): 7,
        ("vllm:dcut_num_pruned_draft_tokens_total", "1", None): 17,
        ("vllm:dcut_num_steps_total", "1", "16"): 2,
        ("vllm:dcut_num_steps_total", "1", "4"): 1,
    }


def exporter(config: Any, speculates: bool = True) -> Any:
    """What exports the metrics of an engine, as far as speculation goes."""

    def __init__(self: Any, vllm_config: Any) -> None:
        unregister_vllm_metrics()
        self.per_engine_labelvalues = {0: ["m", "0"], 1: ["m", "1"]}
        spec = SimpleNamespace(num_speculative_tokens=K) if speculates else None
        self.spec_decoding_prom = SpecDecodingProm(spec, ["model_name", "engine"], self.per_engine_labelvalues)

    made: Any = type("Exporter", (PrometheusStatLogger,), {"__abstractmethods__": frozenset()})
    made = object.__new__(made)
    metrics._create(__init__, made, SimpleNamespace(additional_config=config))
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "dcut: expected True, False or a dict of policy, latency_ms, floor, floor_every, costs, got 1"),
        (["policy"], "dcut: expected True, False or a dict"),
        (
            {"policies": "argmax"},
            "dcut: expected keys of policy, latency_ms, floor, floor_every, costs, got 'polic",
        ),
        ({"policy": "history"}, "dcut: policy: expected argmax or early_stop, got 'history'"),
        ({"latency_ms": 0}, "dcut: latency_ms: expected a number above 0, got 0"),
        ({"latency_ms": "x"}, "dcut: latency_ms: expected a number above 0, got 'x'"),
        ({"latency_ms": True}, "dcut: latency_ms: expected a number above 0, got True"),
        ({"floor": 1.5}, "dcut: floor: expected an int from 0 on, got 1.5"),
        ({"floor_every": -1}, "dcut: floor_every: expected an int from 0 on, got -1"),
        ({"costs": 3}, "dcut: costs: expected the path of a cost table, got 3"),
    ],
)
def test_options_that_cannot_be(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Options.of(SimpleNamespace(additional_config={"dcut": value}))


def test_a_cost_table_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for name in ("none.json", "bad.json", "."):
        with pytest.raises(ValueError, match="dcut: costs: expected the path of a cost table, got "):
            Options(costs=str(tmp_path / name)).table()


class Measured(Runner):
    """Dummy runs that are slow for one request, by mistake, and sleep by tokens."""

    def __init__(self) -> None:
        super().__init__(type("Drafter", (), {"dummy_run": lambda self, tokens: None})())
        self.speculative_config = SimpleNamespace(draft_model_config=None, method="x", draft_sample_method="greedy")
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1)
        self.max_num_tokens, self.max_model_len, self.cudagraph_batch_sizes, self.runs = 64, 512, [4, 8], []
        model = SimpleNamespace(model="m", dtype=torch.float32)
        self.vllm_config = SimpleNamespace(model_config=model, compute_hash=lambda: "hash")
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.runs.append(len(hidden)))

    def _dummy_run(self, tokens: int, force_attention: bool, profile_seq_lens: int) -> tuple[torch.Tensor, None]:
        self.drafter.dummy_run(tokens)
        torch.rand(1)  # as sampling does
        return torch.zeros(max(8, tokens), 1), None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    world = SimpleNamespace(rank_in_group=0, broadcast_object=lambda value, src: value)
    monkeypatch.setattr(costs_module, "get_world_group", lambda: world)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    ticks = iter(range(10**6))
    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: next(ticks) / 1024)
    return tmp_path / "cache" / "dcut"


def test_costs_are_measured_once(cache: Path, warnings: list[str]) -> None:
    runner = Measured()
    table = costs_module.load_or_measure(runner)
    assert table.fingerprint is not None
    assert set(runner.runs) == {4, 8, 16, 24}
    assert runner.runs[:5] == [4, 8, 16, 24, 4]  # in turns
    assert "dummy_run" not in vars(runner.drafter)  # its own again
    runs = len(runner.runs)
    assert costs_module.load_or_measure(runner) == table
    assert len(runner.runs) == runs
    runner.max_num_tokens = 48  # another engine
    costs_module.load_or_measure(runner)
    assert len(runner.runs) == 2 * runs
    assert len(list(cache.iterdir())) == 2
    assert warnings == []


def test_a_damaged_cache_is_measured_again(cache: Path, warnings: list[str]) -> None:
    runner = Measured()
    table = costs_module.load_or_measure(runner)
    for path in cache.iterdir():
        path.write_text("")
    assert costs_module.load_or_measure(runner) == table
    assert len(warnings) == 1
    assert "measures costs once more" in warnings[0]


def test_a_cache_that_cannot_be_written(cache: Path, warnings: list[str]) -> None:
    cache.parent.write_text("a file")
    assert costs_module.load_or_measure(Measured()).costs_ms
    assert "will measure costs at the next start too" in warnings[-1]


def test_the_first_rank_reads_and_writes_for_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    table = costs_module.load_or_measure(Measured())
    (path,) = cache.iterdir()
    path.write_text("damaged")
    runner = Measured()
    world = SimpleNamespace(rank_in_group=1, broadcast_object=lambda value, src: table if runner.runs else None)
    monkeypatch.setattr(costs_module, "get_world_group", lambda: world)
    assert costs_module.load_or_measure(runner) is table
    assert runner.runs  # it takes part
    assert (path.read_text(), warnings) == ("damaged", [])


def test_measuring_draws_no_numbers_of_the_engine(cache: Path) -> None:
    before = torch.get_rng_state()
    costs_module.load_or_measure(Measured())
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_no_step_has_are_not_measured(cache: Path) -> None:
    runner = Measured()
    runner.cudagraph_batch_sizes = [4, 8, 16, 32, 64]
    costs_module.load_or_measure(runner)
    assert set(runner.runs) == {4, 8, 16, 24}


def test_the_first_turn_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], []

    def run() -> None:
        runs.append(1)
        now[0] += 100 if len(runs) == 1 else len(runs)

    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: now[0])
    assert costs_module._time({("verify", 1): run}) == {("verify", 1): 4000.0}  # the median of 2 to 6


def test_more_requests_do_not_draft_in_less_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {1: 39.0, 2: 2.0, 4: 3.0}
    monkeypatch.setattr(
        costs_module, "_time", lambda runs: {(kind, n): found.get(n, 0) if kind == "draft" else n for kind, n in runs}
    )
    table = costs_module.load_or_measure(Measured())
    assert table.draft_ms == pytest.approx((44 / 3,) * 3)


def test_costs_where_nothing_is_captured() -> None:
    table = cost_table({1: 0.5, 4: 1.0}, {1: 1.0, 100: 10.9, 200: 20.9}, 0, 4, None)
    budgets = table.rule.budgets(4)
    assert (budgets[0], budgets[-1], len(budgets)) == (1, 200, 64)
    assert table.costs_ms[1][-1] == pytest.approx(21.9)


def test_costs_behind_the_last_captured_size() -> None:
    table = cost_table({1: 0.0, 4: 0.0}, {4: 1.0, 8: 2.0, 16: 9.0, 24: 11.0}, 8, 4, None)
    priced = dict(zip(table.rule.budgets(4), table.costs_ms[0], strict=True))
    assert {size: priced[size] for size in (4, 8, 9, 16, 24)} == pytest.approx({4: 1, 8: 2, 9: 7.25, 16: 9, 24: 11})
