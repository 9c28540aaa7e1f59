"""The numbers of the demo: pure functions from replays to table rows, sentences and the summary file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .recordings import Source
from .replay import Curve, Replay, compare_texts
from .tables import CostTable

SCHEMA_VERSION = 1


def tokens_per_second(replay: Replay, table: CostTable) -> float:
    """Modelled tokens a second: tokens of all steps, bonus included, over the published cost of each step's budget."""
    tokens = replay.accepted.sum() + replay.accepted.size
    return float(tokens / (np.array(table.costs)[replay.bucket].sum() / 1000))


def policy_row(replay: Replay, full: Replay, table: CostTable) -> dict[str, Any]:
    """One row of the table: what a policy verified and accepted, and its speed relative to full depth.

    Parameters
    ----------
    replay
        Replay of the policy.
    full
        Replay of full depth over the same recording.
    table
        Published costs.
    """
    steps, batch = replay.accepted.shape
    tokens = replay.accepted + 1
    speed = tokens_per_second(replay, table)
    return {
        "table": table.name,
        "policy": replay.policy.name,
        "steps": steps,
        "concurrency": batch,
        "verified_per_step": float(replay.verified.mean()),
        "accepted_per_step": float(replay.accepted.sum(axis=1).mean()),
        "tokens_per_step": float(tokens.sum(axis=1).mean()),
        "tokens_per_verified": float(tokens.sum() / replay.verified.sum()),
        "mat": float(tokens.mean()),
        "kept_share": kept_share(replay),
        "step_ms": float(np.array(table.costs)[replay.bucket].mean()),
        "tokens_per_second": speed,
        "speedup": speed / tokens_per_second(full, table),
        "bucket_steps": np.bincount(replay.bucket, minlength=len(replay.budgets)).tolist(),
        "op_microseconds": float(np.median(replay.op_seconds) * 1e6),
    }


def kept_share(replay: Replay) -> float:
    """Accepted draft tokens as a share of those that full verification of the same drafts would accept."""
    acceptable = int(replay.acceptable.sum())
    return float(replay.accepted.sum() / acceptable) if acceptable else 1.0


def table_rows(replays: Sequence[Replay], table: CostTable) -> list[dict[str, Any]]:
    """Rows of one cost table: every policy that does not depend on costs, and D-cut with this table's costs."""
    full = next(r for r in replays if r.policy.ratio == 1.0)
    return [policy_row(r, full, table) for r in replays if r.policy.table in (None, table.name)]


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def closing_sentences(rows: Sequence[dict[str, Any]], tables: Sequence[CostTable]) -> list[str]:
    """What the tables show, in plain words: a sentence for each table, and one on ranking over a batch.

    Parameters
    ----------
    rows
        Rows of all tables.
    tables
        The cost tables.
    """
    sentences = []
    for table in tables:
        mine = {row["policy"]: row for row in rows if row["table"] == table.name}
        full, dcut = mine["full depth"], mine["D-cut"]
        uniform, ratio = (max(r["speedup"] for n, r in mine.items() if n.startswith(p)) for p in ("uniform", "ratio"))
        verified = dcut["verified_per_step"] / full["verified_per_step"]
        sentences.append(
            f"{table.title}, {count(full['concurrency'], 'request')}: D-cut verifies {verified:.0%} of the positions, "
            f"accepts {dcut['accepted_per_step']:.1f} draft tokens a step where full depth accepts "
            f"{full['accepted_per_step']:.1f}, and its modeled tokens/s is {dcut['speedup']:.2f} times that of full "
            f"depth (best uniform depth {uniform:.2f}, best fixed ratio {ratio:.2f})."
        )
    if full["concurrency"] == 1:
        return sentences
    ranked = mine["ratio 0.25"]
    cut = next(row for row in mine.values() if row["policy"].startswith("uniform"))
    sentences.append(
        f"For the same {ranked['verified_per_step']:.0f} positions a step, ranking them over the whole batch accepts "
        f"{ranked['accepted_per_step']:.1f} draft tokens, the same depth for every request "
        f"{cut['accepted_per_step']:.1f}."
    )
    return sentences


def summary(
    arguments: dict[str, Any],
    source: Source,
    replays: Sequence[Replay],
    rows: Sequence[dict[str, Any]],
    curve: Curve,
    tables: Sequence[CostTable],
    environment: dict[str, str | None],
) -> dict[str, Any]:
    """Everything that ``summary.json`` holds."""
    texts = [compare_texts(replay.texts, source) for replay in replays]
    return {
        "schema_version": SCHEMA_VERSION,
        "arguments": arguments,
        "environment": environment,
        "replay": {
            "recording": source.name,
            "exact": source.exact,
            "concurrency": source.batch,
            "draft_len": source.draft_len,
            "budgets": replays[0].budgets.tolist(),
            "texts_compared": sum(compared for compared, _ in texts),
            "texts_equal_to_greedy": sum(equal for _, equal in texts),
        },
        "tables": [{"name": t.name, "title": t.title, "source": t.source, "step_ms": t.costs} for t in tables],
        "rows": list(rows),
        "acceptance_curve": {
            "verified_per_step": curve.verified.tolist(),
            "accepted_global_top_k": curve.top_k.tolist(),
            "accepted_uniform_depth": curve.uniform.tolist(),
        },
    }
