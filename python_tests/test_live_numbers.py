"""The numbers of the live demo, from steps made by hand."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dcut_kernels.demo.compare import Comparison
from dcut_kernels.demo.live import draw, measure, report, stream
from dcut_kernels.demo.live import run as live
from dcut_kernels.demo.live.measure import Turn
from dcut_kernels.engine import Request, Step
from dcut_kernels.integration import Drafts

PARTS = ("draft", "select", "verify", "rest")


def hand_made(seq_lens, draft_lens, keep_lens, accepted, bucket=-1, milliseconds=(0, 0, 0, 0), output=(), tokens=0):
    """A step of requests with prompts of 4 tokens and up to 3 drafts 11, 12, 13."""
    rows = len(seq_lens)
    drafts = Drafts(
        confidence=torch.zeros(rows, 3),
        draft_ids=torch.tensor([[11, 12, 13]] * rows),
        bonus_ids=torch.zeros(rows, dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens),
        draft_lens=torch.tensor(draft_lens, dtype=torch.int32),
        base_lens=torch.ones(rows, dtype=torch.int32),
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
    )
    requests = [Request([5, 6, 7, 8], 9, seed, list(output)) for seed in range(rows)]
    seconds = {part: value / 1000 for part, value in zip(PARTS, milliseconds, strict=True)}
    return Step(requests, drafts, keep_lens, accepted, tokens, 99, bucket, seconds)


STEPS = [
    hand_made([3, 3], [0, 0], [0, 0], [0, 0], 0, (90, 90, 90, 90)),  # both read the last token of their prompt
    hand_made([4, 4], [3, 3], [3, 1], [2, 1], 2, (1, 2, 3, 4)),
    hand_made([7, 6], [3, 3], [2, 0], [0, 0], 1, (1, 2, 6, 0)),
    hand_made([3, 7], [0, 3], [0, 1], [0, 1], 3, (1, 2, 0, 2)),
    hand_made([8, 8], [0, 0], [0, 0], [0, 0], 0, (1, 2, 3, 2)),  # nothing left to draft, so no bucket was chosen
]


def turn(seconds, tokens, policy="dcut"):
    """One in which the first step commits so many tokens, and the last one more."""
    first, *between, last = STEPS
    steps = [first._replace(tokens=tokens), *between, last._replace(tokens=1)]
    return Turn(policy, steps, [[1], [2]], seconds)


def test_counts_leave_out_prompts():
    assert [report.counts(step) for step in STEPS] == [
        (0, 0, 0, 0),
        (2, 2, 6, 3),
        (2, 2, 4, 0),
        (1, 1, 2, 1),
        (2, 0, 2, 0),
    ]


def test_row_by_hand():
    turns = [turn(1, 1), turn(1, 7), turn(1, 2)]  # 2, 8 and 3 tokens/s
    full = [turn(2, 1), turn(1, 1), turn(2, 5)]  # 1, 2 and 3
    ar = [turn(1, 3), turn(1, 3), turn(1, 3)]  # 4, 4 and 4
    row = report.policy_row(turns, ar, full, 2, Comparison(1, 1, []))
    assert row["speedup"] == pytest.approx(2)  # of 2, 4 and 1; the ratio of the medians would be 1.5
    assert row["speedup_over_ar"] == pytest.approx(3 / 4)
    assert row["rates"] == pytest.approx([2, 8, 3])
    assert row["verified"] == pytest.approx(14 / 4)
    assert row["accepted"] == pytest.approx(4 / 4)
    assert row["accepted_per_verified"] == pytest.approx(4 / 14)
    assert row["mat"] == pytest.approx(1 + 4 / 5)
    assert row["bucket_steps"] == [0, 3, 3, 3, 0, 0, 0]
    assert row["milliseconds"] == pytest.approx(dict(zip(PARTS, (1, 2, 3, 2), strict=True)))
    assert (row["policy"], row["concurrency"], row["prompts"]) == ("dcut", 2, 2)
    assert (row["identical"], row["ties"], row["different"]) == (True, 1, 0)


def test_row_without_drafts():
    steps = [hand_made([3], [0], [0], [0]), hand_made([4], [0], [0], [0])]
    row = report.policy_row([Turn("ar", steps, [[1]], 1)], *[[turn(1, 3)]] * 2, 1, Comparison(0, 0, [0]))
    assert (row["mat"], row["verified"], row["accepted"], row["bucket_steps"]) == (1, 1, 0, [])
    assert (row["identical"], row["different"]) == (False, 1)
    assert report.bucket_steps([hand_made([5], [3], [3], [3])]) == []  # the budget was given


def test_sha256_of_texts():
    expected = "192f318fa669022934c49c8954f9fcf6f2d80170934c284b75752bcb92c08fc2"
    assert report.texts_sha256([[1, 2], [3]]) == expected
    assert report.texts_sha256(((1, 2), (3,))) == expected
    assert report.texts_sha256([[1, 2, 3]]) != expected


def test_kept_depths():
    depths = report.kept_depths(turn(1, 1))
    shown = [[None if math.isnan(depth) else depth for depth in row] for row in depths]
    assert shown == [[None, 3, 2, None, None], [None, 1, 0, 1, None]]
    alone = Turn("dcut", STEPS, [[1]], 1)  # the other request is one beside the last ones
    assert report.kept_depths(alone)[0][1:3] == [3, 2]
    assert len(report.kept_depths(alone)) == 1


def test_policies_take_turns(monkeypatch):
    """Each has the same time in a turn, or a step that takes longer."""
    order, clock = [], {"now": 0}
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock["now"])

    class Texts:
        """An engine that takes so many steps for its texts, two at a time; texts behind them never end."""

        def __init__(self, name, steps):
            self.name, self.steps = name, steps
            self.scheduler = SimpleNamespace(waiting=[], clear=self.clear)
            self.clear()

        def clear(self):
            self.left, self.running = self.steps, []
            self.scheduler.waiting.clear()

        def submit(self, prompts, max_tokens, seeds):
            ((prompt,), (seed,)) = prompts, seeds
            assert prompt == [[1], [2]][seed % 2]
            self.scheduler.waiting.append(SimpleNamespace(output=[max_tokens], finished=False, seed=seed))
            return self.scheduler.waiting[-1:]

        def step(self):
            clock["now"] += measure.SLICE * {"ar": 0.6, "full": 10, "dcut": 100}[self.name]
            order.append(self.name)
            seeds = [request.seed for request in self.scheduler.waiting]
            assert seeds == ([2, 3] if self.running else [0, 1])  # others take the place of texts that end
            self.running += self.scheduler.waiting
            self.scheduler.waiting.clear()
            self.left -= 1
            for request in self.running:
                request.finished = self.left == 0 and request.seed < 2
            return STEPS[0]

    seen = []
    engines = {"ar": Texts("ar", 5), "full": Texts("full", 1), "dcut": Texts("dcut", 2)}
    turns = measure.take_turns(engines, [[1], [2]], 5, 2, lambda policy, step: seen.append((policy, step)))
    for half in (order[:8], order[8:]):
        assert sorted(half[:4]) == ["ar", "ar", "dcut", "full"]  # in any order, but those of a policy together
        assert "ar" in (half[0], half[2]) or half[1:3] == ["ar", "ar"]
        assert sorted(half[4:7]) == ["ar", "ar", "dcut"]
        assert half[7] == "ar"
    assert order[:8] != order[8:]
    assert seen == [(name, STEPS[0]) for name in order]
    texts = [[n] for n in measure.lengths(5, 2)]
    assert [(t.policy, t.steps, t.texts) for t in turns["dcut"]] == [("dcut", [STEPS[0]] * 2, texts)] * 2
    assert all((engine.running, engine.scheduler.waiting) == ([], []) for engine in engines.values())
    assert {name: [t.seconds for t in mine] for name, mine in turns.items()} == {
        "ar": [pytest.approx(5 * 0.6 * measure.SLICE)] * 2,
        "full": [pytest.approx(10 * measure.SLICE)] * 2,
        "dcut": [pytest.approx(200 * measure.SLICE)] * 2,
    }


def test_texts_differ_in_length():
    assert measure.lengths(96, 8) == measure.lengths(96, 64)[:8]
    assert len(set(measure.lengths(96, 64))) > 30
    assert (min(measure.lengths(96, 999)), max(measure.lengths(96, 999))) == (48, 96)
    assert set(measure.lengths(3, 99)) == {2, 3}


def test_what_is_measured():
    assert [measure.powers_up_to(n) for n in (1, 2, 3, 8, 100)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64, 100],
    ]  # fmt: skip
    assert [measure.prompts_of(n, 64) for n in (1, 8, 32, 64)] == sorted(
        measure.prompts_of(n, 64) for n in (1, 8, 32, 64)
    )
    assert measure.prompts_of(64, 64) == 64
    assert measure.prompts_of(8, 8) == 8
    assert measure.prompts_of(1, 1) == 1


def row(policy, concurrency, speedup, over_ar, verified=100.0, accepted=50.0, mat=2.0, select=1.0, **more):
    return {
        "policy": policy, "concurrency": concurrency, "speedup": speedup, "speedup_over_ar": over_ar, "mat": mat,
        "rates": [speedup, 2 * speedup, 4 * speedup],
        "verified": verified, "accepted": accepted, "accepted_per_verified": accepted / verified, "bucket_steps": [],
        "milliseconds": {"draft": 50.0, "select": select, "verify": 48.0, "rest": 1.0}, "ties": 0, "different": 0,
        **more,
    }  # fmt: skip


def test_closing_sentences():
    rows = [
        row("ar", 1, 0.5, 1.0, 1.0),
        row("full", 1, 1.0, 2.0, 16.0, mat=4.0),
        row("uniform-3", 1, 1.1, 2.2, 4.0),
        row("dcut", 1, 1.21, 2.42, 4.0, mat=3.5),
        row("ar", 8, 1.25, 1.0, 8.0),
        row("full", 8, 1.0, 0.8, 128.0, mat=4.0),
        row("uniform-3", 8, 1.5, 1.2, 32.0, 12.0),
        row("ratio-0.25", 8, 1.6, 1.3, 32.0, 14.0),
        row("dcut", 8, 2.0, 1.6, 40.0, 16.0, mat=3.0, select=3.0),
    ]
    assert report.closing_sentences(rows) == [
        "1 request: D-cut reaches 1.21 times the tokens/s of full depth and 1.10 times those of uniform-3, the best "
        "fixed policy; it verifies 25% of the positions that full depth verifies a step, for a MAT of 3.50 instead of "
        "4.00.",
        "8 requests: D-cut reaches 2.00 times the tokens/s of full depth and 1.25 times those of ratio-0.25, the best "
        "fixed policy; it verifies 31% of the positions that full depth verifies a step, for a MAT of 3.00 instead of "
        "4.00.",
        "The selector takes 1.0% to 2.9% of a D-cut step.",
        "8 requests, 32 positions a step: ranked over the whole batch (ratio-0.25) 43.8 drafts are accepted per "
        "100 of them, at the same depth for every request (uniform-3) 37.5.",
        "Plain decoding is faster than full depth at 8 requests at a time.",
    ]
    rows[-1] = row("dcut", 8, 0.8, 0.9, 33.0, 16.0)
    *_, ranking, plain = report.closing_sentences(rows)
    assert ranking.startswith("8 requests, 33 positions a step: ranked over the whole batch (dcut) 48.5 drafts")
    assert plain == "Plain decoding is faster than full depth at 8, than D-cut at 8 requests at a time."
    assert len(report.closing_sentences(rows[:4])) == 3  # one request cannot be ranked
    plain_only = [row("ar", n, 1.2, 1.0) for n in (1, 8, 64)] + [row("full", n, 1.0, 0.8) for n in (1, 8, 64)]
    assert report.closing_sentences(plain_only) == [
        "Plain decoding is faster than full depth at 1, 8 and 64 requests at a time."
    ]
    both = [row("ar", n, 1.0, 1.0) for n in (1, 8)] + [row("full", n, 0.5, 0.5) for n in (1, 8)]
    both += [row("dcut", 1, 1.2, 1.2), row("dcut", 8, 0.9, 0.9)]
    *_, auto = report.closing_sentences(
        [*both, row("dcut-auto", 1, 1.08, 1.1, rates=[1.08, 3.0, 4.0]), row("dcut-auto", 8, 0.98, 1.0)]
    )
    assert auto.endswith("where that is faster (dcut-auto), relative to the best policy: 0.90 at 1, 0.98 at 8.")
    fast = [row("ar", 1, 0.5, 1.0), row("full", 1, 1.0, 2.0)]
    assert report.closing_sentences(fast) == ["Plain decoding is slower than full depth and D-cut everywhere."]


def test_table_fits_110_columns():
    rows = [
        row(
            policy,
            256,
            12.345,
            12.345,
            4096.0,
            bucket_steps=[9] * 16 if policy == "dcut" else [],
            select=1234.5,
            **marks,
        )
        for policy, marks in {"ar": {}, "ratio-0.75": {"ties": 12}, "dcut": {"different": 12}}.items()
    ]
    console = Console(width=110)
    with console.capture() as capture:
        console.print(draw.policy_table(rows, "title", ascii_only=False))
    printed = capture.get()
    assert "…" not in printed
    assert re.search(
        r"dcut +12\.35x +12\.35x 2\.00 +4096\.0 +0\.012 +50\.0 1234\.5 +48\.0 1\.00 █{16} NO \(12\)", printed
    )
    assert re.search(r"ratio-0\.75 .* 1\.00 +yes, 12 ties", printed)


def test_cells():
    assert draw.histogram([0, 1, 8, 4], ascii_only=False) == ".▂█▅"
    assert draw.histogram([0, 1, 8, 4], ascii_only=True) == ".195"
    assert draw.histogram([], ascii_only=False) == ""
    shown = [draw.same_text(row("full", 1, 1, 1, **marks)) for marks in ({}, {"ties": 1}, {"different": 3, "ties": 1})]
    assert shown == ["yes", "yes, 1 tie", "NO (3)"]


def test_worst_round_counts(monkeypatch):
    results = iter([Comparison(2, 2, []), Comparison(3, 0, [1]), Comparison(4, 0, [])])
    monkeypatch.setattr(live, "compare", lambda *args: next(results))
    assert live.compare_rounds(None, [], [turn(1, 1)] * 3, []) == Comparison(3, 0, [1])


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            hand_made([6], [3], [2], [1], output=[1, 2, 11, 21], tokens=2),
            [("accepted", [11]), ("bonus", [21]), ("rejected", [12]), ("pruned", [13])],
        ),
        (
            hand_made([5], [3], [3], [3], output=[1, 11, 12, 13, 21], tokens=4),
            [("accepted", [11, 12, 13]), ("bonus", [21])],
        ),
        (hand_made([5], [3], [3], [3], output=[1, 11], tokens=1), [("accepted", [11])]),  # ended by <eos>
        (hand_made([5], [1], [0], [0], output=[1, 21], tokens=1), [("bonus", [21]), ("pruned", [11])]),
        (hand_made([1], [0], [0], [0]), []),
    ],
)
def test_pieces(step, expected):
    assert stream.pieces(step) == expected


def test_stream_line():
    step = hand_made([6], [3], [2], [1], output=[1, 2, 11, 21], tokens=2)
    console = Console(width=120, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as capture:
        console.print(stream.step_line(7, step, str))
    drawn = capture.get()
    assert re.sub(r"\x1b\[[\d;]*m", "", drawn) == "   7         1 /    2 /       3  +'[11]' ='[21]' x'[12]' .'[13]'\n"
    for mark, code in {"+": "32", "=": "1;36", "x": "31", ".": "90"}.items():
        assert re.search(rf"\x1b\[{code}m {re.escape(mark)}'\[\d+\]'\x1b\[0m", drawn), mark
