"""`smartgen bench orders` without servers: its arms, its sums and ratios, what it shows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.orders import ORDERS
from sglang_smartgen.report.bench_orders import arms_of, parse_shares
from sglang_smartgen.report.order_report import Arm, Measured, needed_bytes, report, table


def measured(order: str, share: float, text: int, fetched: int, answer: int = 1) -> Measured:
    return Measured(
        arm=Arm(order, share),
        text=text,
        answer=[answer],
        fetched_bytes=fetched,
        needed_bytes=2 * fetched,
        local_share=0.5,
    )


ABOUT = {"model": "m", "texts": ["a", "b"], "prompt_tokens": 1536}
FOUND = [
    measured("profile", 0.25, 0, 60),
    measured("profile", 0.25, 1, 40),
    measured("random", 0.25, 0, 120),
    measured("random", 0.25, 1, 80),
    measured("profile", 0.4, 0, 10),
]


def test_shares_are_parsed_and_bad_ones_named() -> None:
    assert parse_shares("0.25,0.4") == [0.25, 0.4]
    for bad in ("", "0", "1.5", "a"):
        with pytest.raises(ConfigError, match="allowed is a list of numbers above 0"):
            parse_shares(bad)


def test_every_order_runs_at_every_share_and_observed_on_an_empty_cache() -> None:
    arms = arms_of([0.25, 0.4])
    assert sorted(arms) == sorted((order, share) for order in ORDERS for share in (0.25, 0.4))
    assert [arm.order for arm in arms[:2]] == ["observed", "observed"]
    assert [arm.order for arm in arms[-2:]] == ["oracle", "oracle"]


def test_bytes_are_summed_by_order_and_compared() -> None:
    found = report(ABOUT, FOUND, {"0.1": [0.3, 0.2], "full": [0.2, 0.2]})
    assert found["fetched_by_share"]["0.25"] == {"profile": 100, "random": 200}
    assert found["fetched_by_share"]["0.4"] == {"profile": 10}
    assert found["fetched_ratios"]["0.25"] == {"profile to random": -0.5}
    assert found["needed_by_share"]["0.25"] == {"profile": 200, "random": 400}
    assert found["on_demand_bytes"] == {"profile": 200, "random": 400}
    assert found["local_share"]["0.25"] == {"profile": 0.5, "random": 0.5}
    assert list(found)[-2:] == ["on_demand_bytes", "tbt_s"] and found["answers_equal"]


def test_without_what_was_pushed_the_fetched_bytes_count() -> None:
    import msgspec

    plain = [msgspec.structs.replace(m, needed_bytes=None) for m in FOUND]
    found = report(ABOUT, plain, {})
    assert found["on_demand_bytes"] == {"profile": 100, "random": 200}
    assert found["on_demand_counts"] == "fetched" and found["needed_by_share"] == {}


def test_answers_that_differ_are_told() -> None:
    other = [*FOUND, measured("streaming", 0.25, 1, 50, answer=2)]
    assert not report(ABOUT, other, {})["answers_equal"]


def test_needed_bytes_count_every_selection_of_what_was_not_pushed(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    counts = np.array([[[3, 1, 0], [0, 2, 5]]], np.int32)
    np.savez(path, counts=counts, pushed=np.array([[1, 0, 0]], np.int8))
    assert needed_bytes(path, 10) == (1 + 2 + 5) * 10
    np.savez(path, counts=counts)
    assert needed_bytes(path, 10) is None


def test_the_table_has_a_row_an_order() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table(report(ABOUT, FOUND[:4], {})))
    assert "profile" in out.getvalue() and "random" in out.getvalue()
