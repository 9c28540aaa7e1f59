"""Every policy of the engine writes the text of plain decoding, however requests are batched, packed and cached."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer

import dcut_kernels
from dcut_kernels.demo.compare import compare
from dcut_kernels.engine import Engine, Request, StepCosts, bucket_depths, load_pair, profile
from dcut_kernels.engine.cache import PagedCache
from dcut_kernels.engine.policies import parse
from dcut_kernels.engine.requests import Scheduler
from dcut_kernels.engine.sampling import sample
from dcut_kernels.integration import Drafts
from dcut_kernels.models import Config, Drafter, Target

PAIR = Path(__file__).parents[1] / "examples" / "tiny_pair"
POLICIES = ("full", "uniform-3", "uniform-7", "ratio-0.25", "ratio-0.5", "ratio-0.75", "dcut")
TOKENS = {0.0: 16, 1.0: 10}  # by temperature; noise takes time
# what steps cost is no matter for the text; these make D-cut move between its buckets
COSTS = StepCosts([1, 64], [0, 15], [[3.0, 7.0], [20.0, 110.0]], [2.0, 12.0])
TIES = []  # texts that parted at a tie, over all tests of this file


@pytest.fixture(scope="module")
def pair():
    return load_pair(PAIR)


@pytest.fixture(scope="module")
def prompts():
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    texts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def plain(pair, prompts):
    """Texts of plain decoding, greedy and sampled."""
    known = {}

    def texts(temperature):
        if temperature not in known:
            known[temperature] = Engine(*pair, "ar", temperature=temperature).generate(prompts, TOKENS[temperature])
        return known[temperature]

    return texts


def same_text(pair, prompts, texts, expected, temperature=0.0):
    comparison = compare(pair[0], prompts, texts, expected, temperature)
    assert comparison.different == []
    TIES.append(comparison.ties)
    assert sum(TIES) <= 2


def test_plain_decoding_is_the_greedy_text_of_the_model(pair, prompts, plain):
    target, cache = pair[0], PagedCache(pair[0].config, 8, 16)
    for prompt, text in list(zip(prompts, plain(0.0), strict=True))[:8]:
        ids = torch.tensor(prompt + text)
        # one pass over the finished text, in one row, without drafts
        rows = cache.rows(torch.tensor([0, len(ids)]), torch.tensor([len(ids)]), torch.arange(8)[None], causal=True)
        hidden, _ = target(ids, torch.arange(len(ids)), cache.attention(torch.arange(len(ids)), rows))
        assert target.logits(hidden).argmax(-1)[len(prompt) - 1 : -1].tolist() == text


def test_sampled_text_is_drawn_token_by_token(pair, prompts, plain):
    target, cache = pair[0], PagedCache(pair[0].config, 8, 16)
    for seed in (3, 4):
        ids = list(prompts[seed])
        for _ in range(6):
            length = len(ids)
            rows = cache.rows(torch.tensor([0, length]), torch.tensor([length]), torch.arange(8)[None], causal=True)
            hidden, _ = target(torch.tensor(ids), torch.arange(length), cache.attention(torch.arange(length), rows))
            ids.append(int(sample(target.logits(hidden[-1:]), 1.0, [seed], [length])))
        assert plain(1.0)[seed][:6] == ids[len(prompts[seed]) :]
        assert plain(1.0)[seed][:6] != plain(0.0)[seed][:6]


def test_drafts_are_accepted_as_far_as_they_are_the_text(pair, prompts):
    engine, steps = Engine(*pair, "dcut", COSTS, max_batch=16), []
    engine.generate(prompts[:16], TOKENS[0.0], on_step=steps.append)
    for step in steps:
        for row, request in enumerate(step.requests):
            exist = int(step.drafts.draft_lens[row])
            after = request.output[int(step.drafts.seq_lens[row]) - len(request.prompt) + 1 :] if exist else []
            assert exist <= max(0, TOKENS[0.0] - len(request.output) + len(after) - 1)
            kept = step.drafts.draft_ids[row, : step.keep_lens[row]].tolist()
            agree = [a == b for a, b in zip(kept, after, strict=False)]
            assert step.accepted[row] == (agree.index(False) if False in agree else len(agree))
    assert sum(map(sum, (step.accepted for step in steps))) > 50


def test_a_request_owns_the_blocks_of_its_last_drafts():
    scheduler = Scheduler(1, 8, 16, draft_len=15)
    assert scheduler.blocks_of(Request([5] * 7, 10)) == 2
    assert scheduler.blocks_of(Request([5] * 8, 10)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("concurrency", "count"), [(1, 64), (4, 64), (8, 64), (16, 64), (32, 256), (64, 256)])
def test_every_policy_writes_the_text_of_plain_decoding(pair, prompts, plain, concurrency, count, temperature):
    chosen, expected = prompts[:count], plain(temperature)[:count]
    for policy in POLICIES if concurrency > 1 else ("ar", *POLICIES):
        engine = Engine(*pair, policy, COSTS, max_batch=concurrency, temperature=temperature)
        texts = engine.generate(chosen, TOKENS[temperature])
        same_text(pair, chosen, texts, expected, temperature)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1}, {"block_size": 7}, {"block_size": 256}, {"chunk": 1}, {"chunk": 5}, {"chunk": 200}],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items()),
)
def test_blocks_and_chunks_do_not_matter(pair, prompts, plain, options):
    engine = Engine(*pair, "dcut", COSTS, max_batch=5, **options)
    for cache in (engine.target_cache, engine.drafter_cache):
        cache.layers.fill_(1e4)  # what an earlier request left
    texts = engine.generate(prompts[:12], TOKENS[0.0])
    same_text(pair, prompts[:12], texts, plain(0.0)[:12])
    assert sorted(engine.scheduler.free) == list(range(5 * engine.row_blocks))


def test_few_blocks_make_requests_wait(pair, prompts, plain):
    engine = Engine(*pair, "full", max_batch=8)
    del engine.scheduler.free[20:]
    batches = []
    texts = engine.generate(prompts[:10], TOKENS[0.0], on_step=lambda step: batches.append(len(step.requests)))
    same_text(pair, prompts[:10], texts, plain(0.0)[:10])
    assert 1 < max(batches) < 8


def test_requests_join_while_others_run(pair, prompts, plain):
    engine, seen = Engine(*pair, "dcut", COSTS, max_batch=4), []
    engine.generate(prompts[:12], TOKENS[0.0], on_step=seen.append)
    in_prompt = [step for step in seen if 0 < int((step.drafts.draft_lens > 0).sum()) < len(step.requests)]
    assert any(int(step.drafts.base_lens.max()) > 1 for step in in_prompt)  # chunks and drafts share a step
    assert max(len(step.requests) for step in seen) == 4
    assert len({id(request) for step in seen for request in step.requests}) == 12


def test_linear_layers_see_the_packed_tokens_only(pair, prompts):
    target, seen = pair[0], []
    engine = Engine(*pair, "dcut", COSTS, max_batch=16)
    steps = []
    handle = target.layers[0].mlp.gate_proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    try:
        engine.generate(prompts[:16], TOKENS[0.0], on_step=steps.append)
    finally:
        handle.remove()
    assert seen == [step.verified for step in steps]
    for step in steps:
        assert step.verified == int(step.drafts.base_lens.sum()) + sum(step.keep_lens)
        assert all(n <= keep for n, keep in zip(step.accepted, step.keep_lens, strict=True))
    assert len({step.bucket for step in steps}) > 1
    assert sum(step.tokens for step in steps) == sum(len(request.output) for request in {*steps[0].requests})


def test_confidence_is_the_probability_of_the_draft(pair, prompts):
    """The engine's drafts are those of one dense pass of the drafter over the same text."""
    target, drafter = pair
    engine = Engine(*pair, "full", max_batch=3)
    engine.generate(prompts[:3], 8)
    request = engine.request(prompts[0], 20)
    engine.scheduler.waiting.append(request)
    while request.in_prompt:
        engine.step()
    drafts = engine.step().drafts
    ids, anchor = torch.tensor([*request.prompt, request.output[0]]), len(request.prompt)
    cache = PagedCache(target.config, 16, 16)
    rows = cache.rows(torch.tensor([0, anchor]), torch.tensor([anchor]), torch.arange(16)[None], causal=True)
    _, features = target(ids[:anchor], torch.arange(anchor), cache.attention(torch.arange(anchor), rows))
    context = drafter.context(features, torch.arange(anchor))

    def attend(layer, q, k, v):
        keys, values = (torch.cat(pair) for pair in zip(context[layer], (k, v), strict=True))
        keys, values = (x.repeat_interleave(3, 1).transpose(0, 1) for x in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values).transpose(0, 1)

    hidden = drafter(target.embed_tokens(ids[anchor]), torch.tensor(anchor), attend)
    probabilities = target.logits(hidden).softmax(-1)
    best, tokens = probabilities.max(-1)
    assert drafts.draft_ids[0].tolist() == tokens.tolist()
    torch.testing.assert_close(drafts.confidence[0], best, rtol=1e-3, atol=1e-5)


def test_texts_end_at_eos_and_at_the_limit():
    request = Request([5], 6)
    assert request.commit([7, 8], eos=0) == 2
    assert not request.finished
    assert request.commit([9, 0, 4], eos=0) == 2
    assert (request.output, request.finished) == ([7, 8, 9, 0], True)
    request = Request([5], 3)
    assert request.commit([1, 2, 3, 4], eos=0) == 3
    assert (request.output, request.finished) == ([1, 2, 3], True)


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = sample(logits.expand(4000, 4), 1.0, [7] * 4000, range(4000))
    assert chisquare(draws.bincount(minlength=4), 4000 * logits.double().softmax(0)).pvalue > 1e-3
    again = sample(logits.expand(3, 4), 1.0, [7, 7, 8], [5, 6, 5])
    assert again[:2].tolist() == draws[5:7].tolist()
    others = sample(logits.expand(4000, 4), 1.0, range(8, 4008), [5] * 4000)
    assert chisquare(others.bincount(minlength=4), 4000 * logits.double().softmax(0)).pvalue > 1e-3
    assert sample(logits.expand(2, 4), 0.0, [], []).tolist() == [0, 0]


def some_drafts(draft_lens, base_lens):
    rows = len(draft_lens)
    ids, lens = torch.zeros(rows, 15, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    counts = (torch.tensor(values, dtype=torch.int32) for values in (draft_lens, base_lens))
    return Drafts(torch.zeros(rows, 15), ids, lens, lens, *counts, torch.zeros(rows, 4, dtype=torch.int32))


def test_what_policies_ask_of_the_operator():
    decode, mixed = some_drafts([15, 15], [1, 1]), some_drafts([0, 15], [30, 1])
    assert parse("full").options(decode) == {"budget": 32}
    assert parse("full").options(mixed) == {"budget": 46}
    assert parse("ar").options(some_drafts([0, 0], [1, 1])) == {"budget": 2}
    assert [parse(f"ratio-{ratio}").options(decode)["budget"] for ratio in (0.01, 0.25, 0.3)] == [2, 8, 10]
    assert parse("ratio-0.25").options(mixed) == {"budget": 34}
    assert parse("dcut").options(decode) == {}
    options = parse("uniform-3").options(decode)
    assert options["budget"] == 32
    assert options["max_keep"].tolist() == [3, 3]


@pytest.mark.parametrize("name", ["", "fast", "uniform", "uniform-x", "ratio-0", "ratio-1.5", "ratio-nan", "dcut-1"])
def test_unknown_policy(name):
    forms = "ar, full, dcut, uniform-K with K drafts, ratio-R with 0 < R < 1"
    with pytest.raises(ValueError, match=f"^policy: expected {forms}, got '{name}'$"):
        parse(name)


def test_errors_name_the_argument(pair):
    with pytest.raises(ValueError, match=r"^costs: expected StepCosts for policy 'dcut', got None$"):
        Engine(*pair, "dcut")
    engine = Engine(*pair, "ar", max_len=40)
    message = r"^prompt: expected 1 to 30 tokens \(max_len 40, max_tokens 10\), got "
    for prompt in ([], [5] * 31):
        with pytest.raises(ValueError, match=f"{message}{len(prompt)}$"):
            engine.generate([[5], prompt], 10)
        assert not engine.scheduler.waiting
    for wrong in (5000, -1, 1.5, True, "d"):
        with pytest.raises(ValueError, match=rf"^prompt: expected token ids from 0 to 2047, got {wrong!r}$"):
            engine.generate([[5], [5, wrong]], 10)
        assert not engine.scheduler.waiting
    for tokens in (0, -1, 40):
        with pytest.raises(ValueError, match=rf"^max_tokens: expected 1 to 39 \(max_len 40\), got {tokens}$"):
            engine.generate([[5]], tokens)
    with pytest.raises(RuntimeError, match=r"^step: expected a waiting or running request, got none$"):
        engine.step()


def test_costs_decide_how_much_is_verified(pair, prompts):
    flat = StepCosts([1, 64], [0, 15], [[5.0, 5.0], [5.0, 5.0]], [5.0, 5.0])
    steep = StepCosts([1, 64], [0, 15], [[1.0, 900.0], [1.0, 9000.0]], [5.0, 5.0])
    steps = []
    Engine(*pair, "dcut", steep, max_batch=8).generate(prompts[:8], TOKENS[0.0], on_step=steps.append)
    assert sum(sum(s.keep_lens) for s in steps if int(s.drafts.base_lens.max()) == 1) == 0
    steps.clear()
    Engine(*pair, "dcut", flat, max_batch=8).generate(prompts[:8], TOKENS[0.0], on_step=steps.append)
    pruned = [
        float(scores[keep])  # the best of those that were not kept
        for step in steps
        for keep, scores, exist in zip(
            step.keep_lens, step.drafts.confidence.cumprod(1), step.drafts.draft_lens.tolist(), strict=True
        )
        if keep < exist
    ]
    assert max(pruned, default=0) < 2**-30  # adds nothing to the expected tokens


def test_buckets_and_their_costs():
    costs = StepCosts([2, 4], [0, 1, 3], [[10.0, 12.0, 20.0], [20.0, 26.0, 50.0]], [8.0, 16.0])
    budgets, prices = costs.table(2, 2)
    assert budgets.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert prices.tolist() == [10.0, 11.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    budgets, prices = costs.table(3, 3)  # between two measured batches
    assert budgets.tolist() == [3, 4, 6, 7, 9, 10, 12]
    assert prices.tolist() == [15.0, 17.0, 19.0, 23.0, 27.0, 31.0, 35.0]
    budgets, prices = costs.table(2, 8)  # six prompt tokens in the same step
    assert budgets.tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert prices.tolist() == pytest.approx([20.0, 21.0, 22.0, 24.0, 26.0, 28.0, 30.0])
    beyond = costs.table(9, 9)[1]
    assert beyond.tolist() == [20.0, 23.0, 26.0, 32.0, 38.0, 44.0, 50.0]
    assert budgets.dtype == torch.int32
    assert prices.dtype == torch.float32


def test_depths_of_the_buckets():
    assert bucket_depths(15) == [0, 0.5, 1, 1.5, 2, 2.5, *range(3, 16)]
    assert bucket_depths(2) == [0, 0.5, 1, 1.5, 2]
    assert bucket_depths(0) == [0]


def test_costs_are_saved_and_restored(tmp_path):
    costs = StepCosts([1, 8], [0, 15], [[1.0, 2.0], [3.0, 4.5]], [0.5, 2.5], "a machine")
    costs.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == costs
    old = tmp_path / "old.json"
    old.write_text('{"schema_version": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"old\.json: expected step costs of schema version 1, got 0$"):
        StepCosts.load(old)


def test_profile_takes_the_median_of_whole_steps(monkeypatch):
    """An engine whose steps take a known time on a clock of their own."""
    clock = {"now": 0.0}
    calls = []

    class Stub:
        block_size = 16

        def run_step(self, batch, tokens, drafting=True):
            turn = sum(call == (batch, tokens, drafting) for call in calls)
            calls.append((batch, tokens, drafting))
            noise = (50, 3, 0, 9)[turn]  # the first turn warms up
            clock["now"] += (tokens * (0.5 if tokens == 6 else 1) + 10 * drafting + noise) / 1000

    monkeypatch.setattr("dcut_kernels.engine.costs.time.perf_counter", lambda: clock["now"])
    costs = profile(Stub(), [2], [0, 1, 2], repeats=3, on_step=lambda: None)
    assert costs.plain_ms == pytest.approx([5])
    assert costs.step_ms == [pytest.approx([15, 17, 17])]  # 16 for the deepest, but costs never decrease
    assert calls == [(2, 2, False), (2, 2, True), (2, 4, True), (2, 6, True)] * 4


def test_profiled_steps_commit_nothing(pair):
    engine = Engine(*pair, "full", max_batch=4)
    engine.run_step(3, 20)
    before = [list(request.output) for request in engine.scheduler.running]
    seen = []
    handle = pair[0].layers[0].mlp.gate_proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    try:
        for tokens, drafting in ((20, True), (48, True), (3, True), (3, False)):
            engine.run_step(3, tokens, drafting)
    finally:
        handle.remove()
    assert seen == [20, 48, 3, 3]
    assert [request.output for request in engine.scheduler.running] == before
    engine.run_step(2, 8)
    assert len(engine.scheduler.running) == 2
    busy = Engine(*pair, "full", max_batch=4)
    busy.scheduler.waiting.append(busy.request([5], 4))
    with pytest.raises(RuntimeError, match=r"^run_step: expected an engine without requests of its own$"):
        busy.run_step(1, 4)


def tiny_target():
    config = Config(8, 8, 8, 1, 2, 1, 4, 32)
    torch.manual_seed(3)
    return Target(config, [0]).requires_grad_(False), Drafter(config, [0], 3)


def test_a_tie_is_told_from_a_difference():
    target, _ = tiny_target()
    cache = PagedCache(target.config, 1, 32)
    rows = cache.rows(torch.tensor([0, 2]), torch.tensor([2]), torch.tensor([[0]]), causal=True)
    hidden, _ = target(torch.tensor([2, 3]), torch.arange(2), cache.attention(torch.arange(2), rows))
    best = int(target.logits(hidden)[1].argmax())
    twin, far = [token for token in range(8) if token not in (best, 2, 3)][:2]
    target.embed_tokens.weight[twin] = target.embed_tokens.weight[best]
    same, tie, other = [best, 1], [twin, 1], [far, 1]
    assert compare(target, [[2, 3]] * 3, [same, tie, other], [same] * 3) == (1, 1, [2])
    assert compare(target, [[2, 3]], [[best]], [same]) == (0, 0, [0])  # a text that stops early is different


def test_rows_see_their_own_past_only():
    cache = PagedCache(Config(8, 8, 8, 1, 2, 1, 4, 32), 6, 2)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 6, 1, 4).unbind(0)
    queries = torch.randn(6, 2, 4)
    table = torch.tensor([[5, 1], [0, 3]])
    slots = torch.tensor([10, 11, 2, 0, 1, 6])  # two rows of three positions each
    rows = cache.rows(torch.tensor([0, 3, 6]), torch.tensor([3, 3]), table, causal=True)
    mixed = cache.attention(slots, rows)(0, queries, keys, values)
    for row in range(2):
        for step in range(3):
            past = slice(3 * row, 3 * row + step + 1)
            weights = (queries[3 * row + step] @ keys[past, 0].T / 2).softmax(-1)
            torch.testing.assert_close(mixed[3 * row + step], weights @ values[past, 0])


def test_the_engine_is_small():
    folder = Path(dcut_kernels.__file__).parent / "engine"
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.py")}
    assert sum(map(len, lines.values())) < 700
    starts = [number for number, line in enumerate(lines["engine.py"]) if line.startswith("    def ")]
    step = next(pair for pair in pairwise(starts) if "def step(" in lines["engine.py"][pair[0]])
    assert step[1] - step[0] <= 40
    protocol = folder.parent / "integration" / "protocol.py"
    assert len(protocol.read_text(encoding="utf-8").splitlines()) < 150
