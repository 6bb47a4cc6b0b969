"""`smartgen bench memory` without servers: command line of the load, saturation, peaks, table."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_smartgen.report import memory_use, serving_load
from sglang_smartgen.report.bench_memory import figures, saturated, summary, table
from sglang_smartgen.report.client import RequestError


def load(mode: str, level: int, rate: float | None, error: str | None = None) -> dict[str, Any]:
    return {
        "mode": mode,
        "concurrency": level,
        "output_tokens_per_s": rate,
        "ttft_s": 1.0,
        "tbt_s": None if error else 0.2,
        "error": error,
        "peak_bytes": {"prefill": level * 10**9, "decode": 2 * 10**9},
    }


def test_a_load_ends_where_more_requests_bring_no_more() -> None:
    assert not saturated([load("full", 1, 5.0)])
    assert not saturated([load("full", 1, 5.0), load("full", 2, 6.0)])
    assert saturated([load("full", 1, 5.0), load("full", 2, 5.1)])
    assert saturated([load("full", 1, None, "gone")])


def test_summary_and_table() -> None:
    loads = [load("full", 1, 5.0), load("full", 2, 5.1), load("stock", 1, None, "gone")]
    found = summary(loads)
    assert found["full"]["concurrency"] == 2
    assert found["full"]["peak_bytes"] == {"prefill": 2 * 10**9, "decode": 2 * 10**9}
    assert found["stock"]["output_tokens_per_s"] == 0
    out = io.StringIO()
    Console(file=out, width=100).print(table(loads))
    assert "stock (failed)" in out.getvalue() and "5.1" in out.getvalue()


def test_figures_of_a_serving_report() -> None:
    report = {"output_throughput": 9.5, "ttfts": [1.0, 3.0], "itls": [[0.1, 0.3], [0.2]]}
    assert figures(report) == {"output_tokens_per_s": 9.5, "ttft_s": 2.0, "tbt_s": 0.2}


def test_the_body_of_a_load_brings_its_sampling_parameters() -> None:
    line = serving_load.command(
        url="http://r",
        model=Path("m"),
        prompts=Path("p"),
        requests=4,
        concurrency=2,
        steps=8,
        smartgen={"mode": "full"},
        out=Path("o"),
    )
    body = json.loads(line[line.index("--extra-request-body") + 1])
    assert body == {
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 8,
            "ignore_eos": True,
            "custom_params": {"smartgen": {"mode": "full"}},
        }
    }


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    out = tmp_path / "o"
    script = f'open({str(out)!r}, \'w\').write(\'{{"errors": ["", "a\\\\nb"]}}\')'
    with pytest.raises(RequestError, match="1 requests failed: b"):
        serving_load.run([sys.executable, "-c", script], out, 60)
    with pytest.raises(RequestError, match="ended with 3: why"):
        fail = "import sys; print('why', file=sys.stderr); sys.exit(3)"
        serving_load.run([sys.executable, "-c", fail], out, 60)


def test_the_peak_of_a_session_is_more_than_nothing() -> None:
    own = os.getsid(0)
    peak = memory_use.peak_bytes(own)
    assert peak > 10**6
