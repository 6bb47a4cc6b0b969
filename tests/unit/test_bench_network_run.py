"""`smartgen bench network` from end to end on pairs that are made up: order, resume, failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_smartgen.cli import main
from sglang_smartgen.report import bench_network, shaped
from sglang_smartgen.report import network_pairs as pairs
from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.cluster import ClusterError
from sglang_smartgen.report.network_cells import Cell
from sglang_smartgen.report.network_pairs import BYTE_KINDS, failed_rows, request_row

FACTS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "max_position_embeddings": 8192,
}


class Letters:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class World:
    """Stands for both pairs and the network; `broken` cells fail, `dead` pairs do not start."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: Callable[[Cell], bool] = lambda cell: False
        self.dead: set[str] = set()

    def pairs(self, *_: Any, **__: Any) -> dict[str, Pair]:
        self.made = {name: Pair(self, name) for name in ("smartgen", "stock")}
        return self.made

    def measure(
        self, pair: Pair, cell: Cell, prompts: Sequence[list[int]], token_bytes: int
    ) -> list[dict[str, Any]]:
        assert len(prompts) == cell.batch and len(prompts[0]) == cell.prompt_tokens
        self.log.append(f"{cell.mode} {cell.mbit}")
        for other in self.made.values():
            assert other.is_down or other.paused == (other is not pair)
        if self.broken(cell):
            pair.doubtful = True
            return failed_rows(cell, "broken")
        times = [1.0 + 0.5 * n for n in range(cell.steps)]
        rows = [request_row(cell, n, Answer(token_times=times), 1e8) for n in range(cell.batch)]
        return [row | {"bytes": dict.fromkeys(BYTE_KINDS, 1)} for row in rows]


class Pair:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.doubtful, self.is_down = world, name, False, True
        self.cluster, self.paused = self, False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def start(self) -> None:
        self.world.log.append(f"start {self.name}")
        if self.name in self.world.dead:
            raise ClusterError(f"{self.name} does not start\nlog")
        self.is_down = False

    def stop(self) -> None:
        self.is_down = True

    def doubt(self) -> None:
        self.doubtful = True

    def make_ready(self, prompt: list[int]) -> bool:
        if not self.doubtful:
            return False
        self.stop()
        self.start()
        self.doubtful = False
        return True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    made = World()
    (tmp_path / "config.json").write_text(json.dumps(FACTS))
    monkeypatch.setenv(shaped.SHAPED_ENV, shaped.ADJUSTABLE)
    monkeypatch.setattr(shaped, "set_rate", lambda mbit, _: made.log.append(f"rate {mbit}"))
    monkeypatch.setattr(bench_network, "ensure_model", lambda: tmp_path)
    monkeypatch.setattr(bench_network.prompts, "load_tokenizer", lambda model: Letters())
    monkeypatch.setattr(pairs, "pairs_of", made.pairs)
    monkeypatch.setattr(pairs, "start_all", lambda found: [pair.start() for pair in found])
    answer = Answer(token_times=[1.0, 1.1, 1.2])
    monkeypatch.setattr(pairs, "warm_up", lambda *_: [answer])
    monkeypatch.setattr(pairs, "settle", lambda *_: made.log.append("settle"))
    monkeypatch.setattr(pairs, "measure", made.measure)
    return made


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "network", "--format", "json", "--steps", "4", *flags])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def test_a_run_ends_with_its_arms(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--modes", "stock,full,smartgen", "--mbit", "none,20", "--rounds", "2")
    code, found = bench(capsys, *flags)
    assert code == 0 and list(found)[-1] == "arms" and len(found["arms"]) == 6
    wanted = {"mode", "mbit", "prompt_tokens", "batch", "ttft_s", "ttst_s", "tbt_s", "bytes"}
    assert wanted | {"tbt_first10_s"} <= set(found["arms"][0])
    assert (found["arms"][0]["ttst_s"], found["arms"][0]["tbt_s"]) == (1.5, 0.5)
    assert found["env"]["MC_TRANSFER_TIMEOUT"] and "tbf" in found["network"]
    assert world.log[2:9] == [
        "full None", "stock None", "smartgen None", "rate 20", "full 20", "stock 20", "smartgen 20",
    ]  # fmt: skip
    assert world.log[9] == "rate None" and "settle" not in world.log


def test_without_full_the_network_is_measured_at_each_rate(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(capsys, "--modes", "partial,smartgen", "--mbit", "none,20", "--rounds", "1")
    assert world.log.count("settle") == 2 and "start stock" not in world.log


def test_a_failed_arm_does_not_stop_the_run(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.broken = lambda cell: cell.mode == "stock" and cell.mbit == 20
    flags = ("--modes", "stock,full", "--mbit", "20,50", "--rounds", "1", "--batch", "2")
    code, found = bench(capsys, *flags)
    arms = {(arm["mode"], arm["mbit"]): arm for arm in found["arms"]}
    assert code == 1 and arms["stock", 20]["error"] == "broken"
    assert arms["stock", 20]["failed"] == 2 and arms["stock", 20]["bytes"] == {}
    assert arms["stock", 50]["failed"] == 0 and world.log.count("start stock") == 2


def test_a_pair_that_does_not_start_again_fails_its_cells_only(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(cell: Cell) -> bool:
        world.dead.add("stock")
        return cell.mode == "stock"

    world.broken = broken
    _, found = bench(capsys, "--modes", "stock,full", "--mbit", "100,50,20", "--rounds", "1")
    errors = [arm["error"] for arm in found["arms"] if arm["mode"] == "stock"]
    assert errors == ["broken", "stock does not start", "stock does not start"]
    assert world.log.count("start stock") == 2  # it is not tried for ever
    assert all(arm["error"] is None for arm in found["arms"] if arm["mode"] == "full")


def test_a_run_resumes_where_its_file_ends(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    flags = ("--modes", "stock,full", "--mbit", "none,20", "--rounds", "1", "--out", str(out))
    _, whole = bench(capsys, *flags)
    lines = out.read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[0])["machine"]["cores"] >= 1
    out.write_text("\n".join(lines[:3]) + "\n" + lines[3][:50])
    world.log.clear()
    _, again = bench(capsys, *flags)
    assert [entry for entry in world.log if entry.startswith(("full", "stock"))] == ["stock 20"]
    assert "start smartgen" not in world.log
    assert again["arms"] == whole["arms"] and len(out.read_text().splitlines()) == 4
    world.log.clear()
    assert bench(capsys, *flags)[1]["arms"] == whole["arms"] and world.log == []
    assert main(["bench", "network", *flags, "--steps", "4", "--config", '{"ratio": 0.3}']) == 2
    assert "another config" in capsys.readouterr().err
