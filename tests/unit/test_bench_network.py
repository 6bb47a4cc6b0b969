"""`smartgen bench network` without servers: cells, resume, medians, ratios, the table."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.report import bench_network, shaped
from sglang_smartgen.report import network_cells as cells
from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.network_cells import Cell, Grid
from sglang_smartgen.report.network_pairs import (
    add_record,
    failed_rows,
    outcome,
    request_row,
    together,
)
from sglang_smartgen.report.network_report import arms, comparisons, link_ratios, show
from sglang_smartgen.report.network_time import Speed, steps_that_fit


def grid(**changes: Any) -> Grid:
    made: dict[str, Any] = {
        "modes": ["stock", "full", "smartgen"],
        "mbit": [None, 20],
        "prompt_tokens": [2048],
        "batch": [1],
        "ratio": [0.1],
        "fill": ["adaptive"],
        "steps": 4,
        "blocks_per_layer": 1024,
        "rounds": 2,
    }
    return Grid(**{**made, **changes})


def row(cell: Cell, first: float, gaps: list[float], **more: Any) -> dict[str, Any]:
    """A line of the file: the first token at `first`, the others with `gaps` between them."""
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    answer = Answer(token_ids=[1] * len(times), token_times=times)
    made = request_row(cell, 0, answer, 1e8)
    kinds = dict.fromkeys(("proactive", "metadata", "on_demand", "speculative"), 1_000_000)
    return {**made, "bytes": kinds, **more}


def rows_of(mbit: int | None, number: int, slower: float = 0.0) -> list[dict[str, Any]]:
    first = {None: 5.0, 20: 40.0}[mbit]
    stock, full, ours = (
        next(c for c in grid().cells() if (c.mode, c.mbit, c.round) == (mode, mbit, number))
        for mode in ("stock", "full", "smartgen")
    )
    return [
        row(stock, first + 5, [0.1] * 3),
        row(full, first + slower, [0.2] * 3, prefill_s=4.0, steps_until_local=0),
        row(ours, 5.0, [1.0, 0.4, 0.2], prefill_s=4.0, steps_until_local=2, fetches=7),
    ]


ROWS = [made for mbit in (None, 20) for n in (0, 1) for made in rows_of(mbit, n, 2.0 * n)]


def test_rounds_are_outside_and_full_shows_the_rate_first() -> None:
    order = [(cell.round, cell.mbit, cell.mode) for cell in grid().cells()]
    assert order[:4] == [
        (0, None, "full"), (0, None, "stock"), (0, None, "smartgen"), (0, 20, "full"),
    ]  # fmt: skip
    assert order[6:9] == [(1, None, "full"), (1, None, "smartgen"), (1, None, "stock")]


def test_only_modes_that_select_or_fill_are_swept() -> None:
    wide = grid(
        modes=list(cells.MODES), mbit=[50], ratio=[0.1, 0.6], fill=[0.05, 0.2], rounds=1
    ).cells()
    count = {mode: sum(cell.mode == mode for cell in wide) for mode in cells.MODES}
    filled = dict.fromkeys(cells.FILLS, 4)
    assert count == {**dict.fromkeys(cells.MODES, 2), "stock": 1, **filled}
    assert len(set(wide)) == len(wide)


@pytest.mark.parametrize("mode", [mode for mode in cells.MODES if mode != "stock"])
def test_the_settings_of_every_mode_are_allowed_to_a_request(mode: str) -> None:
    for cell in grid(modes=[mode], fill=[0.05, "adaptive"]).cells():
        config = SmartGenConfig().for_request(cell.overrides() | {"trace": True})  # type: ignore[operator]
        assert config.ratio == 0.1
        if mode == "no_speculation":
            assert config.speculative_ratio == 0
        if cell.speculative_ratio == 0.05:
            assert (config.credit, config.speculative_ratio) == ("fixed", 0.05)


def test_stock_has_no_settings() -> None:
    assert grid(modes=["stock"]).cells()[0].overrides() is None


def test_a_file_says_what_is_done_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert cells.read_rows(path) == []
    cells.append_rows(path, ROWS[:3])
    with path.open("a") as file:
        file.write('{"mode": "sto')
    assert cells.read_rows(path) == json.loads(json.dumps(ROWS[:3]))
    assert path.read_text().count("\n") == 3
    done = cells.done_cells(cells.read_rows(path))
    left = [cell for cell in grid().cells() if cell not in done]
    assert len(left) == 9 and {c.mode for c in left if c.mbit is None and not c.round} == set()
    path.write_text('{"mode": "stock"}\n')
    with pytest.raises(ConfigError, match="line 1: not a line of smartgen bench network"):
        cells.read_rows(path)


def test_a_batch_is_done_when_all_its_requests_are_there() -> None:
    cell = grid(batch=[2]).cells()[0]
    pair = failed_rows(cell, "gone")
    assert [made["request"] for made in pair] == [0, 1] and pair[0]["error"] == "gone"
    assert cells.done_cells(pair[:1]) == set() and cells.done_cells(pair) == {cell}
    assert outcome(pair) == "failed: gone"


def test_medians_of_an_arm_are_over_rounds() -> None:
    found = {(arm["mbit"], arm["mode"]): arm for arm in arms(ROWS)}
    assert len(found) == 6 and next(iter(found))[0] is None
    full, ours = found[20, "full"], found[20, "smartgen"]
    assert full["ttft_s"] == 41.0 and full["ttst_s"] == pytest.approx(41.2)
    assert ours["tbt_s"] == pytest.approx(0.3) and ours["tbt_first10_s"] == pytest.approx(1.6 / 3)
    assert ours["tbt_local_s"] == pytest.approx(0.2) and full["tbt_local_s"] == pytest.approx(0.2)
    assert ours["tbt_by_step_s"] == [1.0, 0.4, 0.2] and ours["fetches"] == 7
    assert ours["token_s"] == pytest.approx([5.0, 6.0, 6.4, 6.6])
    assert ours["bytes"]["speculative"] == 1_000_000 and ours["requests"] == 2
    assert found[20, "stock"]["fetches"] is None


def test_an_arm_that_failed_has_its_cause_and_no_numbers() -> None:
    stock = next(cell for cell in grid().cells() if cell.mode == "stock")
    (arm,) = arms(failed_rows(stock, "prefill instance might be dead"))
    assert (arm["failed"], arm["requests"], arm["ttft_s"], arm["bytes"]) == (1, 1, None, {})
    assert arm["error"] == "prefill instance might be dead"


def test_smartgen_beside_full_stock_and_ideal() -> None:
    slow = next(one for one in comparisons(arms(ROWS)) if one["mbit"] == 20)
    assert slow["ttst_full"] == pytest.approx(41.2 / 6.0)
    assert slow["ttst_ideal"] == pytest.approx(6.0 / 6.2)
    assert slow["tbt_stock"] == pytest.approx(3.0) and slow["tbt_local"] == pytest.approx(1.0)
    assert slow["token_worst"] == pytest.approx(6.6 / 41.6)
    alone = comparisons([arm for arm in arms(ROWS) if arm["mode"] == "smartgen"])
    assert all(one["ttst_full"] is None and one["token_worst"] is None for one in alone)


def test_ratios_of_the_network() -> None:
    links = {link["mbit"]: link for link in link_ratios(arms(ROWS), 46080)}
    slow = links[20]
    assert slow["transfer_s"] == pytest.approx(2048 * 46080 / 2.5e6)
    assert slow["transfer_per_prefill"] == pytest.approx(slow["transfer_s"] / 4)
    assert slow["transfer_per_step"] == pytest.approx(slow["transfer_s"] / 0.2)
    assert links[None]["bytes_per_s"] == 1e8


def test_the_report_is_json_and_can_be_shown() -> None:
    stock = next(cell for cell in grid(mbit=[50]).cells() if cell.mode == "stock")
    found = arms(ROWS + failed_rows(stock, "a [cause]"))
    report = {
        "links": link_ratios(found, 46080), "compared": comparisons(found), "arms": found,
    }  # fmt: skip
    json.dumps(report, allow_nan=False)
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    text = out.getvalue()
    assert "failed" in next(line for line in text.splitlines() if line.startswith("50 "))
    assert "…" not in text and "50 Mbit/s, stock: 1 of 1 failed: a [cause]" in text
    assert "TTST of full 6.87x of smartgen's" in text and "= 9.44 prefills" in text


RECORD: dict[str, Any] = {
    "room": 9,
    "failure": None,
    "fallback": "",
    "bytes_proactive": 1,
    "bytes_metadata": 2,
    "bytes_on_demand": 3,
    "bytes_speculative": 4,
    "prefill_s": 2.0,
    "steps_until_local": 3,
    "local_share_at_start": 0.5,
    "entries_selected": 10,
    "entries_fetched": 5,
    "fetches": 2,
    "fetch_wait_s": 0.1,
    "steps": 3,
    "opened_at": 100.5,
    "started_at": 104.0,
    "trace": [[104.5, 0.1, 3, 4]],
}


def test_a_row_has_its_records_in_seconds_since_it_was_sent() -> None:
    cell = grid().cells()[0]
    made = row(cell, 5.0, [0.1] * 3)
    push = {
        "began_at": 101.0,
        "prefill_s": 2.0,
        "writes": [[101.5, 102.0, 700, 6], [102, 103, 1, 1]],
    }
    add_record(made, RECORD, push, 100.0)
    assert made["bytes"] == {"proactive": 1, "metadata": 2, "on_demand": 3, "speculative": 4}
    line = made["timeline"]
    assert (line["opened"], line["started"], line["prefill"]) == (0.5, 4.0, [1.0, 3.0])
    assert line["writes"][0] == [1.5, 2.0, 700, 6] and line["steps"] == [[4.5, 0.1, 3, 4]]
    assert made["descriptors"] == 7 and made["error"] is None
    assert cells.cell_of(json.loads(json.dumps(made))) == cell
    add_record(made, {**RECORD, "fallback": "full transfer"}, None, 100.0)
    assert made["error"] == "not SmartGen's: full transfer"


def test_a_cached_prefix_or_a_short_answer_is_an_error() -> None:
    cell = grid().cells()[0]
    cached = request_row(cell, 0, Answer(token_times=[1.0] * 4, cached_tokens=5), None)
    assert "reused 5 cached tokens" in cached["error"]
    short = request_row(cell, 0, Answer(token_times=[1.0] * 3), None)
    assert short["error"] == "3 tokens came, 4 were asked for"


def test_prompts_of_a_batch_differ_from_the_first_token_on() -> None:
    made = bench_network.batch_prompts([5, 5, 6, 5, 7, 8] * 300, 700, 4)
    assert len({prompt[0] for prompt in made}) == 4 and {len(prompt) for prompt in made} == {700}


def test_steps_shrink_to_the_time_there_is() -> None:
    speed = Speed(prefill_s=0.005, step_s=0.5)
    quick = grid(mbit=[None, 50, 20], rounds=1).cells()
    assert steps_that_fit(quick, 1e6, speed, 46080) == 64
    assert steps_that_fit(quick, 10, speed, 46080) == 24
    some = steps_that_fit(quick, 470, speed, 46080)
    fitted = [
        speed.seconds(c, 46080) for c in grid(mbit=[None, 50, 20], rounds=1, steps=some).cells()
    ]
    assert 24 < some < 64 and 380 < sum(fitted) < 470 / 1.1


def test_errors_of_threads_are_raised_and_order_is_kept() -> None:
    assert together([lambda: 1, lambda: 2]) == [1, 2]

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        together([lambda: 1, fail])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("mbit", "fast"), ("modes", "dense"), ("ratio", "0"), ("batch", "0"), ("steps", 2),
     ("prompt_tokens", "x"), ("speculative_ratio", "2"), ("rounds", 0), ("blocks_per_layer", 0)],
)  # fmt: skip
def test_flags_that_cannot_be_used_are_named(flag: str, value: Any) -> None:
    parser = argparse.ArgumentParser()
    bench_network.add_arguments(parser)
    args = parser.parse_args([])
    assert bench_network.grid_of(args).mbit == [None, 1000, 100, 50, 20]
    setattr(args, flag, value)
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        bench_network.grid_of(args)


def test_the_rate_of_the_machines_own_loopback_is_left_alone(monkeypatch: Any) -> None:
    monkeypatch.delenv(shaped.SHAPED_ENV, raising=False)
    monkeypatch.setattr(shaped.subprocess, "run", lambda *_, **__: pytest.fail("ran tc"))
    with pytest.raises(ConfigError, match="own loopback"):
        shaped.set_rate(20)
