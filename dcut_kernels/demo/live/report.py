"""The numbers of the live demo: pure functions from steps to rows, and from rows to sentences."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...engine import Step, bucket_depths
from ..compare import Comparison
from ..report import count
from .measure import Turn

SCHEMA_VERSION = 1
PARTS = ("draft", "select", "verify", "rest")
SAME = 0.05  # two numbers of verified positions that are this close count as equal


class Counts(NamedTuple):
    """What a step did for the requests that have read their prompt."""

    decoding: int  # requests
    drafting: int  # requests with drafts
    verified: int  # positions, bonus tokens included
    accepted: int  # drafts


def counts(step: Step) -> Counts:
    """Counts of one step."""
    decoding = [
        position >= len(request.prompt)
        for request, position in zip(step.requests, step.drafts.seq_lens.tolist(), strict=True)
    ]
    verified = sum(keep + 1 for keep, counted in zip(step.keep_lens, decoding, strict=True) if counted)
    return Counts(sum(decoding), int((step.drafts.draft_lens > 0).sum()), verified, sum(step.accepted))


def policy_row(
    turns: Sequence[Turn], ar: Sequence[Turn], full: Sequence[Turn], concurrency: int, comparison: Comparison
) -> dict[str, Any]:
    """What a policy did, relative to plain decoding and to full depth.

    Steps in which every request still reads its prompt count for the speed alone.

    Parameters
    ----------
    turns, ar, full : sequence of Turn
        Turns of the policy, of plain decoding and of full depth, one a round.
    concurrency : int
        Requests decoded together.
    comparison : Comparison
        Of its texts with those of plain decoding.
    """
    counted = [(step, counts(step)) for turn in turns for step in turn.steps]
    counted = [(step, numbers) for step, numbers in counted if numbers.decoding]
    steps = max(1, len(counted))
    drafting, verified, accepted = (
        sum(getattr(numbers, name) for _, numbers in counted) for name in ("drafting", "verified", "accepted")
    )
    return {
        "policy": turns[0].policy,
        "concurrency": concurrency,
        "prompts": len(turns[0].texts),
        "speedup": speedup(turns, full),
        "speedup_over_ar": speedup(turns, ar),
        "rates": [turn.rate for turn in turns],
        "identical": not comparison.different,
        "ties": comparison.ties,
        "different": len(comparison.different),
        "mat": 1 + accepted / drafting if drafting else 1.0,
        "verified": verified / steps,
        "accepted": accepted / steps,
        "accepted_per_verified": accepted / max(1, verified),
        "bucket_steps": bucket_steps([step for step, numbers in counted if numbers.drafting]),
        "milliseconds": {part: sum(1000 * step.seconds[part] for step, _ in counted) / steps for part in PARTS},
        "texts_sha256": texts_sha256(turns[0].texts),
    }


def speedup(turns: Sequence[Turn], others: Sequence[Turn]) -> float:
    """Median over the rounds of the ratio of tokens per second."""
    return statistics.median(turn.rate / other.rate for turn, other in zip(turns, others, strict=True))


def bucket_steps(steps: Sequence[Step]) -> list[int]:
    """Steps at each of the `bucket_depths`; empty if no step had buckets to choose from."""
    chosen = [step.bucket for step in steps if step.bucket >= 0]
    if not chosen:
        return []
    return [chosen.count(bucket) for bucket in range(len(bucket_depths(steps[0].drafts.confidence.shape[1])))]


def texts_sha256(texts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the texts as a JSON list of token lists."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()


def kept_depths(turn: Turn) -> list[list[float]]:
    """Drafts kept, [requests][steps]; NaN where a request had no drafts."""
    depths = [[float("nan")] * len(turn.steps) for _ in turn.texts]
    for number, step in enumerate(turn.steps):
        for request, keep, drafts in zip(step.requests, step.keep_lens, step.drafts.draft_lens.tolist(), strict=True):
            if drafts and request.seed < len(depths):  # not one of those beside the last ones
                depths[request.seed][number] = keep
    return depths


def closing_sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the tables show, in plain words."""
    concurrencies = list(dict.fromkeys(row["concurrency"] for row in rows))
    tables = [{row["policy"]: row for row in rows if row["concurrency"] == n} for n in concurrencies]
    sentences = []
    if "dcut" in tables[0]:
        sentences += [_dcut_sentence(table) for table in tables]
        shares = [_select_share(table["dcut"]) for table in tables]
        sentences.append(f"The selector takes {_span(shares)} of a D-cut step.")
    ranked = next((found for table in reversed(tables) if (found := _equal_positions(table))), None)
    if ranked:
        sentences.append(_ranking_sentence(*ranked))
    sentences.append(_plain_sentence(tables))
    if "dcut-auto" in tables[0]:
        sentences.append(_auto_sentence(tables))
    return sentences


def _dcut_sentence(table: dict[str, dict[str, Any]]) -> str:
    dcut, full = table["dcut"], table["full"]
    fixed = {name: row["speedup"] for name, row in table.items() if name.startswith(("uniform", "ratio"))}
    against = f"{dcut['speedup']:.2f} times the tokens/s of full depth"
    if fixed:
        best = max(fixed, key=lambda name: fixed[name])
        against += f" and {dcut['speedup'] / fixed[best]:.2f} times those of {best}, the best fixed policy"
    return (
        f"{count(dcut['concurrency'], 'request')}: D-cut reaches {against}; it verifies "
        f"{dcut['verified'] / full['verified']:.0%} of the positions that full depth verifies a step, for a MAT of "
        f"{dcut['mat']:.2f} instead of {full['mat']:.2f}."
    )


def _select_share(row: dict[str, Any]) -> float:
    return row["milliseconds"]["select"] / sum(row["milliseconds"].values())


def _span(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low} to {high}"


def _equal_positions(table: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A policy that ranks the positions of the batch, D-cut if possible, and a uniform one that verifies as many."""
    ranked = [row for name, row in table.items() if name == "dcut" or name.startswith("ratio")]
    uniform = [row for name, row in table.items() if name.startswith("uniform") and row["concurrency"] > 1]
    pairs = [(a, b) for a in ranked for b in uniform if abs(a["verified"] / b["verified"] - 1) <= SAME]
    return min(pairs, key=lambda pair: pair[0]["policy"] != "dcut", default=None)


def _ranking_sentence(ranked: dict[str, Any], uniform: dict[str, Any]) -> str:
    return (
        f"{count(ranked['concurrency'], 'request')}, {ranked['verified']:.0f} positions a step: ranked over the whole "
        f"batch ({ranked['policy']}) {100 * ranked['accepted_per_verified']:.1f} drafts are accepted per 100 of them, "
        f"at the same depth for every request ({uniform['policy']}) {100 * uniform['accepted_per_verified']:.1f}."
    )


def _plain_sentence(tables: Sequence[dict[str, dict[str, Any]]]) -> str:
    parts = []
    for name, title in (("full", "full depth"), ("dcut", "D-cut")):
        slower = [t[name]["concurrency"] for t in tables if name in t and t[name]["speedup_over_ar"] < 1]
        if slower:
            parts.append(f"than {title} at {', '.join(map(str, slower[:-1]))}{' and ' * (len(slower) > 1)}{slower[-1]}")
    if not parts:
        return "Plain decoding is slower than full depth and D-cut everywhere."
    return f"Plain decoding is faster {', '.join(parts)} requests at a time."


def _ratio(row: dict[str, Any], other: dict[str, Any]) -> float:
    """Median over the rounds of how much faster a policy is than another."""
    return statistics.median(a / b for a, b in zip(row["rates"], other["rates"], strict=True))


def _auto_sentence(tables: Sequence[dict[str, dict[str, Any]]]) -> str:
    shares = [min(_ratio(table["dcut-auto"], row) for row in table.values()) for table in tables]
    found = ", ".join(
        f"{share:.2f} at {table['ar']['concurrency']}" for share, table in zip(shares, tables, strict=True)
    )
    return f"D-cut that decodes plainly where that is faster (dcut-auto), relative to the best policy: {found}."
