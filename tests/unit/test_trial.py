"""What counts as right in a trial, and what it must be given back."""

from __future__ import annotations

import random
import threading
from typing import Any, cast

import pytest

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report import idle, shaped, trial
from sglang_smartgen.report.client import Answer, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.trial import Asked, Question, Trial, mixed_lengths

QUESTION = Question([1, 2], {}, [5, 6, 7], [0.5, 1e-5, 0.5])


@pytest.mark.parametrize(
    ("tokens", "error", "verdict"),
    [
        ([5, 6, 7], None, "right"),
        ([5, 9, 9], None, "near"),  # what follows a near tie is another text
        ([5, 6, 8], None, "wrong"),
        ([4, 9, 9], None, "wrong"),
        ([5, 6, 7], "room 3, prefill rank 0: gone", "failed"),
    ],
)
def test_an_answer_is_right_near_wrong_or_failed(
    tokens: list[int], error: str | None, verdict: str
) -> None:
    assert Asked(QUESTION, "x", 0.0, 1.0, Answer(token_ids=tokens, error=error)).verdict == verdict


def test_a_request_without_an_answer_has_failed() -> None:
    assert Asked(QUESTION, "x", 0.0).verdict == "failed"


class Pair:
    """A pair whose state is what the test says."""

    url = "http://nowhere"

    def __init__(self) -> None:
        self.pids = {"prefill": 1, "decode": 2, "router": 3}
        free = {"store_used_bytes": 0, "free_slots": 9, "free_rows": 8}
        self.state: dict[str, dict[str, Any]] = {
            role: {"role": role, **dict.fromkeys(keys, 0), **free}
            for role, keys in idle.OPEN.items()
        }

    def smartgen_state(self, role: str) -> dict[str, Any]:
        return self.state[role]


def test_idle_names_what_is_still_held() -> None:
    pair = Pair()
    cluster = cast(Cluster, pair)
    assert idle.wait_until_idle(cluster)["decode"] == {"free_slots": 9, "free_rows": 8}
    pair.state["decode"]["quarantined_rooms"] = 2
    with pytest.raises(idle.LeakError, match="quarantined_rooms of decode: 2"):
        idle.wait_until_idle(cluster, timeout_s=0.1)


def test_verdicts_are_counted_and_causes_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer(token_ids=[5, 6, 7]), Answer(error="gone"), Answer(error="gone")]

    def answer(*_: Any, **__: Any) -> Answer:
        return answers.pop()

    monkeypatch.setattr(trial, "_ask", answer)
    asked = Trial(cast(Cluster, Pair()))
    ended: list[Asked] = []
    for _ in range(3):
        asked.ask(QUESTION, on_end=ended.append)
    asked.wait(30)
    assert asked.verdicts() == {"right": 1, "failed": 2} and asked.causes() == ["gone"]
    assert len(ended) == 3


def test_lengths_are_those_of_the_seed() -> None:
    lengths = mixed_lengths(50, 10, 20, 1)
    assert lengths == mixed_lengths(50, 10, 20, 1) != mixed_lengths(50, 10, 20, 2)
    assert {min(lengths), max(lengths)} <= set(range(10, 21)) and len(set(lengths)) > 5


def test_only_a_network_of_its_own_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(shaped.SHAPED_ENV, raising=False)
    with pytest.raises(ConfigError, match="namespace of its own"):
        shaped.set_link(up=False)


def test_a_load_keeps_so_many_open_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, open_, most, numbers = threading.Lock(), 0, 0, list[int]()
    full = threading.Event()

    def answer(cluster: Cluster, question: Question, rid: str) -> Answer:
        nonlocal open_, most
        with lock:
            open_ += 1
            most = max(most, open_)
            if open_ == 3:
                full.set()
        full.wait(5.0)  # the first three are out together
        with lock:
            open_ -= 1
        return Answer(token_ids=[5, 6, 7])

    monkeypatch.setattr(trial, "_ask", answer)
    run = Trial(cast(Cluster, Pair()))
    run.load([QUESTION], 12, 3, 10.0, random.Random(1), numbers.append)
    assert most == 3 and numbers == list(range(12)) and run.verdicts() == {"right": 12}


def test_a_load_ends_when_a_request_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(trial, "_ask", lambda *_, **__: over.wait(30.0))
    with pytest.raises(RequestError, match="2 requests have no end"):
        Trial(cast(Cluster, Pair())).load([QUESTION], 9, 2, 0.1, random.Random(1))
    over.set()
