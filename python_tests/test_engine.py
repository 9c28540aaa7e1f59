"""Every policy of the engine writes the text of plain decoding, however requests are batched, packed and cached."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer

import dcut_kernels
from dcut_kernels.cost import AngelSlimRatios, CostTable, interpolate
from dcut_kernels.cost import profile as measure
from dcut_kernels.demo.compare import compare
from dcut_kernels.engine import Engine, Request, bucket_depths, load_pair, profile
from dcut_kernels.engine.cache import PagedCache
from dcut_kernels.engine.costs import PASSES, SETTLE
from dcut_kernels.engine.engine import UNWRITTEN
from dcut_kernels.engine.policies import FORMS, parse
from dcut_kernels.engine.requests import Scheduler
from dcut_kernels.gate import ENOUGH, PROBED
from dcut_kernels.integration import Drafts
from dcut_kernels.models import Config, Drafter, Target
from dcut_kernels.sampling import Dice, sample

PAIR = Path(__file__).parents[1] / "examples" / "tiny_pair"
POLICIES = (
    "full", "uniform-3", "uniform-7", "ratio-0.25", "ratio-0.5", "ratio-0.75",
    "dcut", "dcut-early_stop", "dcut-history", "dcut-auto",
)  # fmt: skip
TOKENS = {0.0: 16, 1.0: 10}  # by temperature; noise takes time


def costs_of(rows, plain_ms=None):
    """Costs at batches 1 and 64 of no and all drafts, and all buckets on the line between."""
    ends = CostTable((1, 64), rows, AngelSlimRatios((0.0, 1.0), 15), plain_ms)
    return interpolate(ends, AngelSlimRatios(tuple(depth / 15 for depth in bucket_depths(15)), 15))


# what steps cost is no matter for the text; these make D-cut move between its buckets
COSTS = costs_of(((3.0, 7.0), (20.0, 110.0)), (1.2, 18.0))
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


def test_requests_can_leave_unfinished(pair, prompts):
    engine = Engine(*pair, "full", max_batch=2)
    requests = engine.submit(prompts[:4], 20)
    for _ in range(3):
        engine.step()
    engine.scheduler.clear()
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running
    assert sorted(engine.scheduler.free) == list(range(2 * engine.row_blocks))
    assert [request.blocks for request in requests] == [[]] * 4
    assert engine.generate(prompts[:2], 20) == Engine(*pair, "ar", max_batch=2).generate(prompts[:2], 20)


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
    plans = [parse(name)[3:] for name in ("dcut", "dcut-early_stop", "dcut-history-auto", "full")]
    assert plans == [("argmax", False), ("early_stop", False), ("history", True), (None, False)]
    options = parse("uniform-3").options(decode)
    assert options["budget"] == 32
    assert options["max_keep"].tolist() == [3, 3]


@pytest.mark.parametrize(
    "name", ["", "fast", "uniform", "uniform-x", "ratio-0", "ratio-1.5", "ratio-nan", "dcut-1", "-auto", "full-auto"]
)
def test_unknown_policy(name):
    with pytest.raises(ValueError, match=f"^policy: expected {re.escape(FORMS)}, got '{name}'$"):
        parse(name)


def test_no_policy_asks_for_more_drafts_than_there_are(pair):
    assert parse("uniform-63").depth == 63
    for name, most, make in (
        ("uniform-64", 63, parse),
        ("uniform-16", 15, lambda name: Engine(*pair, name)),
        ("uniform-4", 3, lambda name: parse(name, 3)),
    ):
        message = f"policy: expected uniform-K with K up to {most}, the drafts of a row, got '{name}'"
        with pytest.raises(ValueError, match=f"^{message}$"):
            make(name)
    assert Engine(*pair, "uniform-15").policy.depth == 15


def test_errors_name_the_argument(pair):
    with pytest.raises(ValueError, match=r"^costs: expected a CostTable for policy 'dcut', got None$"):
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
    flat = costs_of(((5.0, 5.0), (5.0, 5.0)))
    steep = costs_of(((1.0, 900.0), (1.0, 9000.0)))
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


def test_depths_of_the_buckets():
    assert bucket_depths(15) == [0, 0.5, 1, 1.5, 2, 2.5, *range(3, 16)]
    assert bucket_depths(2) == [0, 0.5, 1, 1.5, 2]
    assert bucket_depths(0) == [0]


def test_profile_takes_the_median_of_whole_steps(monkeypatch):
    """An engine whose steps take a known time on a clock of their own."""
    clock = {"now": 0.0}
    calls, settle = [], SETTLE

    class Stub:
        block_size = 16

        def run_step(self, batch, tokens, drafting=True):
            turn = sum(call == (batch, tokens, drafting) for call in calls)
            calls.append((batch, tokens, drafting))
            slow = (5, 3, 1, 1, 2)[turn // (1 if tokens > 2 else settle + 1) % 5]  # of the turn; the first one warms up
            clock["now"] += slow * (tokens * (0.5 if tokens == 6 else 1) + 10 * drafting) / 1000

    monkeypatch.setitem(measure.__kwdefaults__, "clock", lambda: clock["now"])
    costs = profile(Stub(), [2], [0, 1, 2], repeats=4)
    assert costs.plain_ms == pytest.approx([3])
    assert costs.costs_ms == (pytest.approx([18, 19.125, 20.25, 20.25, 20.25]),)  # 21 and 19.5: costs never decrease
    assert costs.rule.budgets(2) == (2, 3, 4, 5, 6)
    first, plain = [(2, 2, True)] * (settle + 1), [(2, 2, False)] * (settle + 1)
    assert calls == [*first, (2, 4, True), (2, 6, True), *plain] * 5 * PASSES


DEAR = costs_of(((50.0, 70.0), (500.0, 900.0)), (1.0, 9.0))  # drafted steps, at 1 and 10 requests; and plain ones


def test_plain_steps_where_drafting_does_not_pay(pair, prompts):
    """Drafting at fifty times the price of plain decoding: after the first steps, only probes draft."""
    first = ENOUGH // PROBED  # steps
    engine, steps = Engine(*pair, "dcut-auto", DEAR, max_batch=8), []
    texts = engine.generate(prompts[:8], 80, on_step=steps.append)
    assert texts == Engine(*pair, "ar", max_batch=8).generate(prompts[:8], 80)
    metrics = engine.planner.metrics
    assert first <= metrics.steps == sum(int(step.drafts.draft_lens.max()) > 0 for step in steps) < first + 4
    assert metrics.plain > 20
    cheap = Engine(*pair, "dcut-auto", costs_of(((1.0, 1.5), (10.0, 20.0)), (1.0, 10.0)), max_batch=8)
    cheap.generate(prompts[:8], 80)
    assert (cheap.planner.metrics.plain, cheap.planner.metrics.probes) == (0, first + 1)  # a long prompt
    always, steps = Engine(*pair, "dcut", DEAR, max_batch=8), []
    always.generate(prompts[:8], 80, on_step=steps.append)
    assert (always.planner.metrics.plain, always.planner.metrics.probes) == (0, 0)


def test_steps_of_one_kind_are_timed(pair, prompts, monkeypatch):
    """Those that read no prompt, and in which all requests drafted or none did."""
    for costs in (DEAR, costs_of(((1.0, 1.5), (10.0, 20.0)), (1.0, 10.0))):
        engine, timed, expected = Engine(*pair, "dcut-auto", costs, max_batch=8), [], []
        monkeypatch.setattr(engine.planner, "timed", lambda *step, to=timed: to.append(step))
        engine.submit(prompts[:10], 60)
        while engine.scheduler.waiting or not all(request.finished for request in engine.scheduler.running):
            step = engine.step()
            drafted = (step.drafts.draft_lens > 0).tolist()
            read = bool((step.drafts.base_lens > 1).any())
            if len(set(drafted)) == 1 and not read and not engine.planner.probing:
                expected.append((len(drafted), step.verified, drafted[0], sum(step.seconds.values())))
        assert [step[:3] for step in timed] == [step[:3] for step in expected]
        assert [step[3] for step in timed] == pytest.approx([1000 * step[3] for step in expected])
        assert {step[2] for step in timed} >= {costs is not DEAR}


def test_the_planner_hears_which_steps_will_be_timed(pair, prompts, monkeypatch):
    engine = Engine(*pair, "dcut-auto", costs_of(((1.0, 1.5), (10.0, 20.0)), (1.0, 10.0)), max_batch=8)
    answer, heard = engine.planner.should_draft, []
    monkeypatch.setattr(
        engine.planner, "should_draft", lambda rows, timeable: heard.append(timeable) or answer(rows, timeable)
    )
    engine.submit(prompts[:10], 60)
    while engine.scheduler.waiting or not all(request.finished for request in engine.scheduler.running):
        heard.clear()
        drafted = (engine.step().drafts.draft_lens > 0).tolist()
        assert heard == ([all(drafted)] if any(drafted) else [])


def test_probes_draft_a_few_rows_and_read_what_they_missed(pair, prompts):
    """Drafts after plain steps are those of an engine that reads the same text as its prompt."""
    engine, probes = Engine(*pair, "dcut-auto", DEAR, max_batch=10, max_len=200), []
    engine.planner.gate.probe_every = 7
    requests = engine.submit(prompts[:10], 30)
    while not any(request.finished for request in requests):
        texts = [[*request.prompt, *request.output] for request in engine.scheduler.running]
        step = engine.step()
        rows = step.drafts.draft_lens.nonzero()[:, 0].tolist()
        assert len(rows) <= PROBED
        probes += [(texts[row], step.drafts.draft_ids[row], step.drafts.confidence[row]) for row in rows]
    assert len(probes) > 2 * PROBED
    for text, draft_ids, confidence in probes[-PROBED:]:
        drafts = first_drafts(pair, text[:-1])
        assert drafts.bonus_ids.tolist() == text[-1:]
        assert drafts.draft_ids[0].tolist() == draft_ids.tolist()
        torch.testing.assert_close(drafts.confidence[0], confidence, rtol=1e-3, atol=1e-5)


def test_features_that_no_drafter_reads_do_not_pile_up(pair, prompts):
    engine = Engine(*pair, "dcut-auto", DEAR, max_batch=8)
    kept = []
    engine.generate(prompts[:8], 100, on_step=lambda step: kept.append(len(engine.verified)))
    assert 2 < max(kept) < UNWRITTEN < len(kept)


@pytest.fixture
def read(pair, monkeypatch):
    """Positions that the drafter reads, call by call."""
    counts, context = [], pair[1].context
    monkeypatch.setattr(pair[1], "context", lambda features, at: counts.append(len(at)) or context(features, at))
    return counts


def test_the_drafter_reads_each_position_once(pair, prompts, read):
    engine = Engine(*pair, "full", max_batch=3)
    requests, checked = engine.submit(prompts[:3], 12), 0
    while not any(request.finished for request in requests):
        drafts = engine.step().drafts
        if int((drafts.draft_lens > 0).sum()) == 3:
            assert sum(read) == int(drafts.seq_lens.sum())
            checked += 1
    assert checked > 2


def first_drafts(pair, prompt):
    """What follows a prompt and its first token."""
    engine = Engine(*pair, "full", max_batch=1, max_len=200)
    engine.scheduler.waiting.append(request := engine.request(prompt, 20))
    while request.in_prompt or not request.output:
        engine.step()
    return engine.step().drafts


def test_profiled_steps_commit_nothing(pair, read):
    engine = Engine(*pair, "full", max_batch=4)
    engine.run_step(3, 20)
    assert len({request.last_position for request in engine.scheduler.running}) == 3
    read.clear()
    before = [list(request.output) for request in engine.scheduler.running]
    seen = []
    handle = pair[0].layers[0].mlp.gate_proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    try:
        for tokens, drafting in ((20, True), (48, True), (3, True), (3, False)):
            engine.run_step(3, tokens, drafting)
    finally:
        handle.remove()
    assert seen == [20, 48, 3, 3]
    assert read == [6, 6, 6]  # two tokens a request, as after a step that commits them
    assert [request.output for request in engine.scheduler.running] == before
    engine.run_step(2, 8)
    assert len(engine.scheduler.running) == 2
    busy = Engine(*pair, "full", max_batch=4)
    busy.scheduler.waiting.append(busy.request([5], 4))
    with pytest.raises(RuntimeError, match=r"^run_step: expected an engine without requests of its own$"):
        busy.run_step(1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected 1 or more, got 0"),
        ({"block_size": 0}, "block_size: expected 1 or more, got 0"),
        ({"chunk": 0}, "chunk: expected 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature: expected 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected 0 or more, got nan"),
        ({"dice": Dice()}, "temperature: expected above 0 with dice, got 0.0"),
    ],
)
def test_options_that_cannot_be(pair, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Engine(*pair, "full", **options)
    engine = Engine(*pair, "full", max_batch=2)
    with pytest.raises(ValueError, match=r"^batch: expected 1 to 2 \(max_batch\), got 4$"):
        engine.run_step(4, 8)


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
