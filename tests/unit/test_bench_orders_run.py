"""`smartgen bench orders` and `smartgen profile` from end to end on servers that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from sglang_smartgen.cli import main
from sglang_smartgen.core.profile import read_profile
from sglang_smartgen.core.recordings import RECORD_DIR_ENV
from sglang_smartgen.report import bench_orders, profile
from sglang_smartgen.report.client import Answer

LAYERS, HEADS, DIM = 4, 2, 8


class Servers:
    """Stands for a pair: records what it is asked and writes recordings."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.configs: list[dict[str, Any]] = []
        self.flushes: list[int] = []
        self.folder = Path()
        self.bytes = 0

    def cluster(
        self, model: Path, *, config: dict[str, Any], env: dict[str, str], **_: Any
    ) -> Self:
        self.configs.append(config)
        self.folder = Path(env[RECORD_DIR_ENV])
        self.url = "http://made.up"
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, progress: Callable[..., None]) -> None:
        progress(0.0, {"prefill": True})

    def stop(self) -> None:
        pass

    def flush_cache(self, role: str) -> None:
        self.flushes.append(len(self.requests))

    def smartgen_state(self, role: str) -> dict[str, Any]:
        return {"bandwidth": 1e6}

    def client(self, url: str) -> Self:
        return self

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, smartgen: Any = None, **_: Any
    ) -> Answer:
        overrides = dict(smartgen or {})
        self.requests.append(overrides | {"tokens": len(prompt)})
        self.bytes = 1000 + len(self.requests)
        if name := overrides.get("record"):
            counts = np.ones((LAYERS - 2, HEADS, len(prompt)), np.int32)
            pushed = np.zeros((LAYERS - 2, len(prompt)), np.int8)
            facts: dict[str, Any] = {
                "steps": 7,
                "prefill_s": 2.0,
                "selector": "exact",
                "ratio": 0.1,
            }
            np.savez(self.folder / f"{name}.npz", counts=counts, pushed=pushed, **facts)
        answer = Answer(token_ids=[5] * max_new_tokens, finish_reason="length")
        answer.token_times = [0.5 + 0.1 * i for i in range(max_new_tokens)]
        return answer

    def record(self, cluster: Any, rid: str) -> dict[str, Any]:
        known = {"bytes_on_demand": self.bytes, "bytes_metadata": 320, "local_share_at_start": 0.3}
        return known | {"failure": None, "fallback": ""}


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    model = tmp_path / "model"
    model.mkdir()
    facts = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS}
    facts |= {"head_dim": DIM, "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(facts))
    made = Servers()
    for module in (bench_orders, profile):
        monkeypatch.setattr(module, "Cluster", made.cluster)
        monkeypatch.setattr(module, "Client", made.client)
        monkeypatch.setattr(module, "finished_record", made.record)
        monkeypatch.setattr(module, "ensure_model", lambda: model)
        monkeypatch.setattr(module.prompts, "load_tokenizer", lambda model: Tokenizer())
    return made


def test_bench_orders_profiles_measures_and_prints_one_object(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    assert main(["bench", "orders", "--quick", "--format", "json", "--work", str(work)]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.count("\n") == 1 and list(found)[-2:] == ["on_demand_bytes", "tbt_s"]
    assert set(found["on_demand_bytes"]) == {
        "observed", "profile", "sequential", "random", "streaming", "oracle",
    }  # fmt: skip
    # Every entry selected once, none pushed: 2 layers, 2 heads, 1,536 tokens of 64 bytes.
    assert found["on_demand_bytes"]["profile"] == 2 * 2 * 1536 * 64
    assert list(found["tbt_s"]) == ["0", "0.05", "0.1", "0.2", "full"]
    assert [len(steps) for steps in found["tbt_s"].values()] == [7] * 5
    assert found["answers_equal"]
    first, second = servers.configs
    assert first["order"] == "sequential" and second["profile"].endswith("profile.safetensors")
    by_order = {r["order"]: r for r in servers.requests if r.get("record") and "order" in r}
    assert {r["proactive_blocks"] for r in by_order.values()} == {256}
    assert by_order["oracle"]["recording"] == by_order["observed"]["record"]
    before = len(servers.requests)
    assert main(["bench", "orders", "--quick", "--format", "json", "--work", str(work)]) == 0
    again = servers.requests[before:]
    assert not [r for r in again if r.get("mode") == "full" and "record" in r]  # recorded before


def test_profile_writes_file_and_map_and_tells_k_r(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "p.safetensors"
    text.write_text("abcdefgh" * 400)
    command = ["profile", f"x={text}", "--out", str(out), "--ranges", "300-500,600-800"]
    command += ["--per-range", "2", "--max-new-tokens", "8", "--bandwidth-mbit", "50"]
    assert main([*command, "--config", '{"ratio": 0.1}', "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    made = read_profile(out)
    assert made.manifest.token_bytes == 2 * LAYERS * HEADS * DIM * 4
    assert made.manifest.sparse_layers == [2, 3]
    assert [r.recordings for r in made.manifest.ranges] == [2, 2]
    tokens = made.manifest.ranges[0].prompt_tokens
    assert made.manifest.ranges[0].transfer_s == pytest.approx(tokens * 512 / 1e6)
    assert found["k_r"] == [[400 * 4], [700 * 4]]  # fast: everything
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert [r.get("tokens") for r in servers.requests] == [300, 350, 450, 650, 750]
    assert main([*command, "--config", '{"ratio": 0.1}']) == 0
    assert len(servers.requests) == 5  # nothing was missing
    assert "Rank correlation" in capsys.readouterr().out
    assert main(["profile", "--out", str(tmp_path)]) == 2
    assert "allowed is a file in a folder that exists" in capsys.readouterr().err
