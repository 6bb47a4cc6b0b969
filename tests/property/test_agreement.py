"""Ranks that see other things decide the same in the same step, and free nothing too early."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ranks_of, together

from sglang_smartgen.core.agreement import Agreement

SIZES = st.integers(1, 3)
STEPS, REQUESTS, SLOTS = 8, 6, 3
cause = st.one_of(st.none(), st.text(min_size=1, max_size=4))


@settings(deadline=None, max_examples=60)
@given(st.data(), SIZES, st.integers(0, 4))
def test_a_request_fails_on_all_ranks_with_the_cause_of_the_lowest(
    data: st.DataObject, size: int, requests: int
) -> None:
    batch = st.lists(cause, min_size=requests, max_size=requests)
    causes = [data.draw(batch) for _ in range(size)]
    ranks = ranks_of(size)
    agreed = together(
        [
            partial(Agreement(rank).failures, known)
            for rank, known in zip(ranks, causes, strict=True)
        ]
    )
    wanted = [next((c for c in column if c), None) for column in zip(*causes, strict=True)]
    assert agreed == [wanted] * size
    for rank in ranks:  # the texts are told only where there is a failure
        assert rank.calls == (0 if size == 1 or not requests else 1 + any(wanted))


@settings(deadline=None, max_examples=60)
@given(st.data(), SIZES)
def test_slots_are_freed_in_the_first_step_in_which_all_ranks_find_them_safe(
    data: st.DataObject, size: int
) -> None:
    """Step s: the requests that end in it are released, some become safe, then all settle."""
    ends = [data.draw(st.integers(0, STEPS - 1)) for _ in range(REQUESTS)]
    after = st.one_of(st.none(), st.integers(0, STEPS))
    safe_at = [
        [None if (wait := data.draw(after)) is None else end + wait for end in ends]
        for _ in range(size)
    ]

    def run(agreement: Agreement, mine: list[int | None]) -> list[tuple[list[int], int]]:
        freed: list[int] = []
        steps, safe = [], {}
        for step in range(STEPS):
            for request in range(REQUESTS):
                if ends[request] == step:
                    safe[request] = agreement.release(partial(freed.append, request))
            for request, call in safe.items():
                at = mine[request]
                if at is not None and at <= step:
                    call()  # also again: P may acknowledge twice
            agreement.settle()
            steps.append((freed[:], agreement.held))
        return steps

    runs = together(
        [partial(run, Agreement(rank), safe_at[n]) for n, rank in enumerate(ranks_of(size))]
    )
    assert runs == [runs[0]] * size
    for step, (freed, held) in enumerate(runs[0]):
        wanted = {
            request
            for request in range(REQUESTS)
            if all((at := mine[request]) is not None and at <= step for mine in safe_at)
        }
        assert set(freed) == wanted and len(freed) == len(wanted)
        assert held == sum(end <= step for end in ends) - len(freed)


def admissions(agreement: Agreement, safe_at: dict[int, int]) -> list[list[int]]:
    """A scheduler with SLOTS slots: which requests it admits in each step.

    Each request ends in the step after it was admitted; its slot can be written to until
    `safe_at` steps later. Every second request is committed, whose slot is free at once.
    """
    free, waiting, running, log = [SLOTS], list(range(2 * REQUESTS)), [], []
    pending: list[tuple[int, object]] = []

    def give_back() -> None:
        free[0] += 1

    for step in range(4 * STEPS):
        for request in running:
            if request % 2:
                give_back()
            else:
                safe = agreement.release(give_back)
                pending.append((step + safe_at.get(request, 0), safe))
        for at, safe in pending:
            if at <= step:
                safe()  # type: ignore[operator]
        agreement.settle()
        running = [waiting.pop(0) for _ in range(min(free[0], len(waiting)))]
        free[0] -= len(running)
        log.append(running)
    return log


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.dictionaries(st.integers(0, 11), st.integers(0, 5)), min_size=2, max_size=3),
)
def test_ranks_admit_the_same_requests_in_the_same_step(late: list[dict[int, int]]) -> None:
    ranks = ranks_of(len(late))
    logs = together(
        [partial(admissions, Agreement(r), mine) for r, mine in zip(ranks, late, strict=True)]
    )
    assert logs == [logs[0]] * len(late)
    assert sum(map(len, logs[0])) == 2 * REQUESTS


def test_ranks_that_decide_alone_admit_others() -> None:
    """What the agreement is for: the same two ranks, each on its own."""
    logs = [admissions(Agreement(), late) for late in ({}, {0: 3, 2: 3})]
    assert logs[0] != logs[1]


def test_a_rank_that_does_not_follow_is_noticed() -> None:
    first, second = (Agreement(rank) for rank in ranks_of(2))
    first.release(lambda: None)
    first._ranks._barrier.abort()  # type: ignore[attr-defined]
    with pytest.raises(threading.BrokenBarrierError):
        first.settle()
    second.settle()  # it has released nothing, so it says nothing


def test_what_frees_is_not_run_again_when_it_raises() -> None:
    def run(agreement: Agreement) -> int:
        def fails() -> None:
            raise RuntimeError("no such slot")

        agreement.release(fails)()
        with pytest.raises(RuntimeError, match="no such slot"):
            agreement.settle()
        agreement.settle()
        return agreement.held

    assert together([partial(run, Agreement(rank)) for rank in ranks_of(2)]) == [0, 0]
