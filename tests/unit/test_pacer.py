"""When a slice may go between fetches, and how long a prefill is expected to take."""

from __future__ import annotations

import pytest

from sglang_smartgen.core.speed import SMOOTHING as SPEED_SMOOTHING
from sglang_smartgen.core.speed import PrefillSpeed
from sglang_smartgen.transfer.pacer import CAUTION, GRACE, MIN_GRACE_S, SMOOTHING, Pacer


def rhythm(gap_s: float = 0.1, layer: int = 3, steps: int = 3) -> tuple[Pacer, float]:
    """A pacer that has seen `steps` equal gaps after `layer`; and when it was last answered."""
    pacer, now = Pacer(), 100.0
    for _ in range(steps):
        pacer.answered("d", layer, now)
        now += gap_s
        pacer.asked("d", now)
    pacer.answered("d", layer, now)
    return pacer, now


def test_a_link_that_nobody_fetches_over_is_free() -> None:
    pacer = Pacer()
    assert pacer.wait_s("d", 10.0, 5.0) == 0.0
    pacer.asked("d", 5.0)
    assert pacer.wait_s("d", 10.0, 5.1) == 0.0
    pacer.answered("d", 3, 5.2)  # the first answer: no gap is known yet
    assert pacer.wait_s("d", 10.0, 5.3) == 0.0


def test_a_slice_goes_when_it_ends_well_before_the_next_request() -> None:
    pacer, at = rhythm(gap_s=0.1)
    fits = CAUTION * 0.1
    assert pacer.wait_s("d", fits - 0.001, at) == 0.0
    assert pacer.wait_s("d", fits + 0.001, at) > 0
    assert pacer.wait_s("d", 0.01, at + fits - 0.011) == 0.0
    assert pacer.wait_s("d", 0.01, at + fits - 0.009) > 0


def test_a_slice_that_does_not_fit_waits_for_the_request_and_a_grace() -> None:
    pacer, at = rhythm(gap_s=0.1)
    end = 0.1 + GRACE * 0.1
    assert pacer.wait_s("d", 1.0, at) == pytest.approx(end)
    assert pacer.wait_s("d", 1.0, at + 0.12) == pytest.approx(end - 0.12)
    assert pacer.wait_s("d", 1.0, at + end + 0.001) == 0.0  # no request came: it is free
    short, at = rhythm(gap_s=0.0005)
    assert short.wait_s("d", 1.0, at) == pytest.approx(0.0005 + MIN_GRACE_S)


def test_gaps_are_of_the_layer_that_was_answered_last() -> None:
    pacer, at = rhythm(gap_s=0.1, layer=3)
    pacer.asked("d", at + 0.1)
    pacer.answered("d", 4, at + 0.1)
    assert pacer.wait_s("d", 1.0, at + 0.1) == 0.0  # of layer 4 nothing is known
    pacer.asked("d", at + 0.3)
    pacer.answered("d", 3, at + 0.3)
    assert pacer.wait_s("d", 1.0, at + 0.3) == pytest.approx(0.1 * (1 + GRACE))
    pacer.asked("d", at + 0.4)
    pacer.answered("d", 4, at + 0.4)
    assert pacer.wait_s("d", 1.0, at + 0.4) == pytest.approx(0.2 * (1 + GRACE))


def test_the_mean_follows_and_a_pause_between_requests_says_nothing() -> None:
    pacer, at = rhythm(gap_s=0.1)
    pacer.asked("d", at + 0.2)
    pacer.answered("d", 3, at + 0.2)
    mean = 0.1 + SMOOTHING * 0.1
    assert pacer.wait_s("d", 1.0, at + 0.2) == pytest.approx(mean * (1 + GRACE))
    pacer.asked("d", at + 60.0)
    pacer.answered("d", 3, at + 60.0)
    assert pacer.wait_s("d", 1.0, at + 60.0) == pytest.approx(mean * (1 + GRACE))


def test_a_request_frees_the_link_until_its_answer_and_counts_once() -> None:
    pacer, at = rhythm(gap_s=0.1)
    pacer.asked("d", at + 0.1)
    assert pacer.wait_s("d", 1.0, at + 0.1) == 0.0
    pacer.asked("d", at + 0.9)  # asked twice before an answer: the second is no gap
    pacer.answered("d", 3, at + 0.9)
    assert pacer.wait_s("d", 1.0, at + 0.9) == pytest.approx(0.1 * (1 + GRACE))


def test_sessions_do_not_disturb_each_other() -> None:
    pacer, at = rhythm()
    pacer.asked("e", at)
    pacer.answered("e", 3, at)
    assert pacer.wait_s("e", 1.0, at) == 0.0 < pacer.wait_s("d", 1.0, at)


# Prefill speed.


def test_speed_is_unknown_at_first_and_nonsense_teaches_nothing() -> None:
    speed = PrefillSpeed()
    assert speed.expect(100) is None
    speed.learn(0, 1.0)
    speed.learn(10, 0.0)
    speed.learn(10, -1.0)
    assert speed.expect(100) is None


def test_speed_is_per_token_in_the_nearest_range() -> None:
    speed = PrefillSpeed({1000: 2.0})
    assert speed.expect(1000) == pytest.approx(2.0)
    assert speed.expect(600) == pytest.approx(1.2)  # the same power of two
    assert speed.expect(50_000) == pytest.approx(100.0)  # nothing nearer is known
    speed.learn(50_000, 500.0)
    assert speed.expect(50_000) == pytest.approx(500.0)
    assert speed.expect(1000) == pytest.approx(2.0)
    assert speed.expect(5_000) == pytest.approx(10.0)


def test_speed_follows_slowly() -> None:
    speed = PrefillSpeed({1000: 1.0})
    speed.learn(1000, 2.0)
    assert speed.expect(1000) == pytest.approx(1.0 + SPEED_SMOOTHING)
    for _ in range(40):
        speed.learn(1000, 2.0)
    assert speed.expect(1000) == pytest.approx(2.0, rel=1e-4)
