"""`smartgen profile` without servers: which prompts it cuts, what it resumes, what it shows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.profile import Recorder, sparse_layers
from sglang_smartgen.report.profile_prompts import (
    ProfilePrompt,
    cut_prompts,
    parse_ranges,
    read_texts,
)
from sglang_smartgen.report.profile_view import similarity_line, table


def test_ranges_are_parsed_and_bad_ones_named() -> None:
    assert parse_ranges("256-512, 512-1024") == [(256, 512), (512, 1024)]
    for bad in ("", "256", "512-256", "a-b", "256-512-1024"):
        with pytest.raises(ConfigError, match="allowed is a list of START-STOP"):
            parse_ranges(bad)
    with pytest.raises(ConfigError, match="must ascend and not overlap"):
        parse_ranges("256-512,500-1024")


def test_texts_have_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("once")
    assert read_texts([f"prose={path}", str(path)]) == [("prose", "once"), ("story", "once")]
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_texts([str(tmp_path / "none")])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        read_texts([str(path)])
    assert len(read_texts([])) >= 3


def test_prompts_spread_over_a_range_and_take_texts_in_turn() -> None:
    texts = [("a", list(range(1000))), ("b", list(range(1000, 1500)))]
    found = cut_prompts(texts, [(100, 200), (600, 800)], per_range=2, settings={"ratio": 0.1})
    assert [(p.data_set, len(p.token_ids)) for p in found] == [
        ("a", 125),
        ("b", 175),
        ("a", 650),
        ("a", 750),
    ]
    assert found[2].token_ids[0] == 125  # behind the first piece of the text
    assert len({p.name for p in found}) == 4
    again = cut_prompts(texts, [(100, 200)], per_range=2, settings={"ratio": 0.1})
    other = cut_prompts(texts, [(100, 200)], per_range=2, settings={"ratio": 0.2})
    assert again[0].name == found[0].name != other[0].name
    with pytest.raises(ConfigError, match="a prompt of 1500 tokens; the longest text has 1000"):
        cut_prompts(texts, [(1000, 2000)], per_range=1, settings={})


def test_only_what_is_missing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    recorder = Recorder(tmp_path, {}, tmp_path / "work", tmp_path, 8)
    wanted = [ProfilePrompt(name, "a", [1] * 20) for name in ("x", "y", "z")]
    ran: list[str] = []

    def run(missing: list[ProfilePrompt], total: int) -> None:
        for prompt in missing:
            ran.append(prompt.name)
            counts = np.ones((2, 1, 20), np.int32)
            facts: dict[str, Any] = {"steps": 1, "prefill_s": 1.0, "selector": "s", "ratio": 0.1}
            np.savez(tmp_path / "work" / f"{prompt.name}.npz", counts=counts, **facts)
            (tmp_path / "work" / f"{prompt.name}.json").write_text('{"bytes_metadata": 40}')
            if len(ran) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "_run_missing", run)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(wanted)
    (tmp_path / "work" / "y.json").unlink()  # cut off between the recording and its notes
    assert [r.name for r in recorder.record(wanted)] == ["x", "y", "z"]
    assert ran == ["x", "y", "y", "z"]
    recorder.record(wanted)
    assert len(ran) == 4


def test_sparse_layers_are_those_of_full_attention() -> None:
    assert sparse_layers({"num_hidden_layers": 5}, 3) == [2, 3, 4]
    kinds = ["sliding_attention", "full_attention"] * 3
    assert sparse_layers({"num_hidden_layers": 6, "layer_types": kinds}, 2) == [3, 5]
    with pytest.raises(ConfigError, match="the recordings have 4 layers"):
        sparse_layers({"num_hidden_layers": 5}, 4)


def test_the_table_shows_k_r_and_its_share() -> None:
    report = {
        "model": "m",
        "selector": "hata",
        "ratio": 0.1,
        "ranges": [
            {"start": 100, "stop": 200, "recordings": 3, "prefill_s": 1.5, "transfer_s": None}
        ],
        "all_blocks": [400],
        "bandwidth_mbit": [50, 10_000],
        "k_r": [[100, 400]],
    }
    out = io.StringIO()
    Console(file=out, width=80).print(table(report))
    text = out.getvalue()
    assert all(part in text for part in ("100-199", "1.50", "25%", "100%", "10 Gbit/s"))
    line = similarity_line({"between_texts": 0.523, "between_sets": None, "between_lengths": 0.9})
    assert line.endswith("between texts 0.52, data sets -, lengths 0.90")
