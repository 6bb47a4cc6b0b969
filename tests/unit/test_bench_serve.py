"""The figures of `smartgen bench serve`."""

from __future__ import annotations

import pytest

from sglang_smartgen.report import bench_serve


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)]
)
def test_a_quantile_is_one_of_the_values(share: float, wanted: float) -> None:
    assert bench_serve.quantile_ms([n / 1000 for n in range(1, 101)], share) == wanted
    assert bench_serve.quantile_ms([], share) == 0.0


def test_shares_are_taken_within_a_round() -> None:
    """A machine that got slower between two rounds must not look like a slow arm."""
    speed = {"off": [100.0, 50.0, 10.0], "elsewhere": [80.0, 50.0, 10.0], "on": [90.0, 45.0, 9.0]}
    arm = bench_serve._arm(speed, [0.002, 0.001, 0.004], 2)
    assert arm["prefill_share"] == 0.9
    assert arm["prefill_share_of_elsewhere"] == 0.9
    assert arm["prefill_tokens_per_s"] == {"off": 50.0, "elsewhere": 50.0, "on": 45.0}
    assert (arm["fetches"], arm["failed"], arm["fetch_max_ms"]) == (3, 2, 4.0)


def test_where_the_fetches_of_a_window_go() -> None:
    ends = {"thread": 1, "process": 2}
    assert bench_serve._served(ends, "thread", "off") is None
    assert bench_serve._served(ends, "thread", "on") == 1
    assert bench_serve._served(ends, "thread", "elsewhere") == 2
    assert bench_serve._served(ends, "process", "elsewhere") == 1
