"""What `smartgen bench rails` computes from its samples; the run itself needs root and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_smartgen.report.bench_rails import deciding_us
from sglang_smartgen.report.rails_plot import draw, series
from sglang_smartgen.report.rails_runs import Sample, dip_ms, rate_mbit

STEP_S = 0.02
MBIT = 1e6 / 8  # bytes/s


def samples(dip: tuple[float, float] = (9.0, 9.0)) -> list[Sample]:
    """Two rails of 80 Mbit/s for 6 s; the second is cut at 2 s, in the dip nothing moves."""
    found, first, second = [], 0.0, 0.0
    for i in range(300):
        at = i * STEP_S
        found.append(Sample(50 + at, [int(first), int(second)], [False, at >= 2.3]))
        if not dip[0] <= at < dip[1]:
            first += 80 * MBIT * STEP_S
            second += 80 * MBIT * STEP_S * (at < 2.0)
    return found


def test_rates_are_those_of_both_rails_between_two_times() -> None:
    assert rate_mbit(samples(), 0.0, 1.9) == pytest.approx(160, rel=0.01)
    assert rate_mbit(samples(), 3.0, 5.0) == pytest.approx(80, rel=0.01)


def test_a_dip_lasts_until_the_other_rail_carries_what_it_can() -> None:
    assert dip_ms(samples(), 52.3, 72.0) == 0.0
    assert dip_ms(samples((2.2, 2.8)), 52.3, 72.0) == pytest.approx(500, abs=40)
    assert dip_ms(samples((2.2, 9.0)), 52.3, 72.0) == float("inf")


def test_the_picture_shows_each_rail_through_the_failure(tmp_path: Path) -> None:
    times, rates = series(samples())
    assert len(rates) == 2 and len(times) == len(rates[0])
    before = max(i for i, at in enumerate(times) if at < 1.9)
    assert rates[1][before] == pytest.approx(80, rel=0.05) and rates[1][-1] == 0.0
    draw(samples(), [(2.0, "cut")], tmp_path / "rails.png")
    assert (tmp_path / "rails.png").stat().st_size > 5000


def test_deciding_is_cheap() -> None:
    """Far above the 20 us that are promised: other processes have this core too."""
    assert deciding_us(100) < 200
