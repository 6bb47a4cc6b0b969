"""`smartgen plot`: every figure is written from small made-up lines, or says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_smartgen.cli import main
from sglang_smartgen.report import network_cells as cells
from sglang_smartgen.report import plot_data
from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.network_cells import Cell, Grid
from sglang_smartgen.report.network_pairs import failed_rows, request_row
from sglang_smartgen.report.plot import FIGURES
from sglang_smartgen.report.plot_data import ideal_of, read, slice_of
from sglang_smartgen.report.plot_timeline import LANES, lanes_of


def cells_of(**changes: Any) -> list[Cell]:
    made: dict[str, Any] = {
        "modes": list(cells.MODES),
        "mbit": [None, 20],
        "prompt_tokens": [2048],
        "batch": [1],
        "ratio": [0.1],
        "fill": ["adaptive"],
        "steps": 4,
        "blocks_per_layer": 1024,
        "rounds": 1,
    }
    return Grid(**{**made, **changes}).cells()


def row(cell: Cell) -> dict[str, Any]:
    first = 5.0 if cell.mbit is None or cell.mode == "smartgen" else 40.0
    times = [first, first + 0.5, first + 0.8, first + 1.0]
    made = request_row(cell, 0, Answer(token_times=times), 1e8)
    made["bytes"] = dict.fromkeys(("proactive", "metadata", "on_demand", "speculative"), 1)
    if cell.mode != "stock":
        made |= {"prefill_s": 4.0, "steps_until_local": 2}
        made["timeline"] = {
            "opened": 0.1,
            "started": first,
            "prefill": [0.5, 4.5],
            "writes": [[1.0, 3.0, 100, 2]],
            "steps": [[first + 0.1, 0.2, 9, 9], [first + 0.5, 0.0, 0, 9], [first + 0.8, 0.0, 0, 0]],
        }
    return made


ORDERS = {
    "model": "m",
    "texts": ["a"],
    "prompt_tokens": 1536,
    "needed_by_share": {"0.25": {"random": 2e6, "profile": 1e6, "oracle": 5e5}},
    "fetched_by_share": {},
}


def test_every_figure_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot_data, "DPI", 50)  # drawing is most of the time
    lines, orders = tmp_path / "n.jsonl", tmp_path / "o.jsonl"
    wide = cells_of(modes=["full", "smartgen"], batch=[2], ratio=[0.1, 0.6])
    rows = [row(cell) for cell in (*cells_of(), *wide)]
    rows += failed_rows(cells_of(modes=["stock"], batch=[4])[0], "gone")
    cells.append_rows(lines, rows)
    orders.write_text(json.dumps(ORDERS) + "\n")
    folder = tmp_path / "figures"
    code = main(["plot", str(lines), str(orders), "--out", str(folder), "--format", "json"])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["skipped"] == {}
    assert [Path(path).stem for path in found["written"]] == list(FIGURES)
    for path in found["written"]:
        assert Path(path).read_bytes()[:4] == b"\x89PNG" and Path(path).stat().st_size > 5000


def test_missing_data_skips_a_figure_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "n.jsonl"
    stock = cells_of(modes=["stock"])
    cells.append_rows(lines, failed_rows(stock[0], "gone"))
    assert main(["plot", str(lines), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == len(FIGURES)
    assert "skipped orders: no report of bench orders" in said.err
    assert not list(tmp_path.glob("*.png"))


def test_a_foreign_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "n.jsonl"
    lines.write_text(json.dumps(row(cells_of()[0])) + "\n[1]\n")
    assert main(["plot", str(lines), "--out", str(tmp_path)]) == 2
    assert f"{lines}, line 2: neither a request" in capsys.readouterr().err


def test_a_slice_varies_in_one_key_only(tmp_path: Path) -> None:
    lines = tmp_path / "n.jsonl"
    extra = cells_of(modes=["full", "smartgen"], ratio=[0.6])
    cells.append_rows(lines, [row(cell) for cell in (*cells_of(), *extra)])
    data = read([lines])
    found = slice_of(data.arms, ("mode", "mbit"))
    assert {arm["ratio"] for arm in found} == {0.1, None} and len(found) == 16
    swept = slice_of(data.arms, ("mode", "ratio"), mbit=20)
    assert {(a["mode"], a["ratio"]) for a in swept if a["ratio"] == 0.6} == {
        ("full", 0.6), ("smartgen", 0.6),
    }  # fmt: skip
    assert {arm["mbit"] for arm in swept} == {20}
    assert ideal_of(found, "ttst_s") == 5.5


def test_lanes_of_a_timeline() -> None:
    made = row(next(c for c in cells_of() if c.mode == "smartgen"))
    lanes = lanes_of(made)
    assert lanes["P computes"] == [(0.5, 4.0)] and lanes["P pushes"] == [(1.0, 2.0)]
    (first, second, third), (wait,) = lanes["D decodes"], lanes[LANES[3]]
    assert wait == pytest.approx((5.1, 0.2)) and first == pytest.approx((5.3, 0.2))
    assert second == pytest.approx((5.5, 0.3)) and third == pytest.approx((5.8, 0.2))
    assert len(lanes["fill arrives"]) == 2
