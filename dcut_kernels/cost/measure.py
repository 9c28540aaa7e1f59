"""Measures what steps cost, on any engine."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from ._values import batch_sizes, integer, number, require
from .build import as_rule
from .fingerprint import Fingerprint
from .rules import Rule
from .table import CostTable
from .views import require_extra


def profile(
    run_step: Callable[[int, int], object],
    batches: Sequence[int],
    budgets: Rule | Sequence[int],
    *,
    plain: Callable[[int], object] | None = None,
    repeats: int = 5,
    passes: int = 1,
    warm_up: int = 1,
    settle: int = 0,
    time_limit: float | None = None,
    on_progress: Callable[[int, int], object] | None = None,
    progress: bool = False,
    fingerprint: Fingerprint | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure whole steps: medians of turns over all buckets of a batch.

    Parameters
    ----------
    run_step : callable
        ``run_step(batch, tokens)`` runs one step of `batch` requests that verifies `tokens` positions, drafting
        included, configured as in serving, and returns when the device has finished it.  It commits nothing.
    batches : sequence of int
        Batch sizes to measure, ascending.
    budgets : Rule or sequence of int
        Buckets; numbers are token counts.  One below the batch cannot hold the bonus tokens: it is not run, and
        disabled.
    plain : callable, optional
        ``plain(batch)`` runs a step of plain decoding.
    repeats, passes, warm_up : int
        Turns that count, of each pass over all batches, and turns before them that do not.  More passes with fewer
        turns spread a batch over the time that all take: for a machine that is not always as fast.
    settle : int
        Untimed steps of the same kind before the first bucket of a turn, and before the step of plain decoding, where
        a step depends on what those before it left in caches.
    time_limit : float, optional
        Seconds after which nothing is repeated.  Each batch of a pass has an equal share.
    on_progress : callable
        ``on_progress(done, total)`` is called after each step; `total` supposes that all turns are taken.
    progress : bool
        Show a bar (needs rich).
    fingerprint : Fingerprint, optional
        What is measured.
    clock : callable
        Seconds.

    Raises
    ------
    ValueError
        If the time limit is reached before every bucket was measured once; the message says how far it came.
    """
    rule, batches = as_rule(budgets), batch_sizes(batches)
    repeats, passes = integer("repeats", repeats), integer("passes", passes)
    warm_up, settle = integer("warm_up", warm_up, 0), integer("settle", settle, 0)
    for name, call in (("run_step", run_step), ("plain", plain), ("on_progress", on_progress)):
        require(name, callable(call) or (call is None and name != "run_step"), "a callable", repr(call))
    limit = math.inf if time_limit is None else number("time_limit", time_limit)
    require("time_limit", limit > 0, "seconds above 0", limit)
    buckets = [[budget for budget in rule.budgets(batch) if budget >= batch] for batch in batches]
    for batch, usable in zip(batches, buckets, strict=True):
        require(
            "budgets", len(usable) > 0, f"one of at least {batch} tokens, for the bonus tokens", rule.budgets(batch)
        )
    points = sum(map(len, buckets)) + (len(batches) if plain else 0)
    measured, done, steps = 0, 0, points * (repeats + warm_up) * passes
    kinds = [
        [functools.partial(run_step, batch, budget) for budget in usable]
        + ([functools.partial(plain, batch)] if plain else [])
        for batch, usable in zip(batches, buckets, strict=True)
    ]
    times: list[list[list[float]]] = [[[] for _ in runs] for runs in kinds]  # of each batch and kind
    visits = [*zip(batches, buckets, kinds, times, strict=True)] * passes
    with ExitStack() as stack:
        reports = [on_progress] if on_progress else []
        if progress:
            reports.append(stack.enter_context(_bar()))
        start = clock()
        for place, (batch, usable, runs, its_times) in enumerate(visits, start=1):
            for turn, kind in ((turn, kind) for turn in range(-warm_up, repeats) for kind in range(len(runs))):
                run, taken, before = runs[kind], its_times[kind], clock()
                if taken and before >= start + limit * place / len(visits):
                    for others in its_times:  # of a turn that is not finished
                        del others[len(its_times[-1]) :]
                    break
                if not taken and before >= start + limit:
                    raise ValueError(
                        f"time_limit: expected {points} points to be measured in {limit:g} s, got {measured} (at "
                        f"batch {batch}); measure fewer batches or buckets, or give it more time"
                    )
                for _ in range(settle if kind in (0, len(usable)) else 0):
                    run()
                before = clock()
                run()
                after = clock()
                if turn >= 0:
                    measured += not taken
                    taken.append(1000 * (after - before))
                done += 1
                for report in reports:
                    report(done, steps)
    typical = [_typical(its_times) for its_times in times]
    plain_ms = tuple(row.pop() for row in typical) if plain else None
    rows = tuple(
        (math.inf,) * (len(rule.budgets(batch)) - len(row)) + tuple(row)
        for batch, row in zip(batches, typical, strict=True)
    )
    return CostTable(batches, rows, rule, plain_ms, None, fingerprint)


def _typical(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each kind of step the median of its share of a turn, times the median turn.

    A machine that is slow for some turns and fast for others makes all kinds of a turn slow or fast; medians of the
    times themselves would take one kind from a slow turn and the next from a fast one.
    """
    turns = list(zip(*times, strict=True))
    totals = [sum(turn) for turn in turns]
    kinds = [zip(kind, totals, strict=True) for kind in zip(*turns, strict=True)]
    shares = [[time / total for time, total in kind if total] or [0.0] for kind in kinds]
    return [median(totals) * median(kind) for kind in shares]


@contextmanager
def _bar() -> Iterator[Callable[[int, int], object]]:
    """A progress bar, as a callback."""
    require_extra("rich", "progress")
    from ..demo.terminal import make_console, progress_bar

    with progress_bar(make_console()) as bar:
        task = bar.add_task("step costs", total=None)
        yield lambda done, steps: bar.update(task, completed=done, total=steps)
