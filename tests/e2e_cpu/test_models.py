"""Qwen3 (q and k normed) and Gemma-3 (sliding layers): equal to stock, and local or not alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from e2e_cpu.small_models import save_model

if TYPE_CHECKING:
    from e2e_cpu.conftest import Pairs

SPARSE = {"qwen3": [2, 3, 4, 5, 6, 7], "gemma3": [3, 5, 7]}
MODELS = pytest.mark.parametrize("kind", SPARSE)


@pytest.fixture(scope="module")
def results(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `model_host.py` prints for each model; both run at the same time."""
    pairs.stop()  # their cores are wanted here
    folder = tmp_path_factory.mktemp("models")
    for kind in SPARSE:
        save_model(kind, folder / kind)
    with ThreadPoolExecutor() as pool:
        return dict(zip(SPARSE, pool.map(lambda kind: _run(folder / kind), SPARSE), strict=True))


@MODELS
def test_only_full_attention_is_selected_from(results: dict[str, Any], kind: str) -> None:
    assert results[kind]["sparse_layers"] == SPARSE[kind]


@MODELS
def test_everything_equals_stock(results: dict[str, Any], kind: str) -> None:
    """k = all, alone and as a ragged batch, whatever was local, looking ahead or not."""
    stock = results[kind]["stock"]
    assert len({tuple(tokens) for tokens in stock}) == 2
    assert all(len(set(tokens)) > 4 for tokens in stock)  # else nothing could be seen in them
    arms = [name for name in results[kind] if name.startswith(("stock", "all"))]
    assert len(arms) == 10
    assert {name: results[kind][name] for name in arms} == dict.fromkeys(arms, stock)


@MODELS
@pytest.mark.parametrize("selector", ["hata", "hata ahead"])
def test_transfer_changes_nothing(results: dict[str, Any], kind: str, selector: str) -> None:
    local = results[kind][f"{selector}, 1.0 local"]
    assert local != results[kind]["stock"]
    for name in ("1.0 local, batch", "0.25 local", "0.25 local, batch"):
        assert results[kind][f"{selector}, {name}"] == local, name


@MODELS
def test_lookahead_is_another_selection(results: dict[str, Any], kind: str) -> None:
    assert results[kind]["hata ahead, 1.0 local"] != results[kind]["hata, 1.0 local"]


def test_unknown_layers_are_refused(results: dict[str, Any]) -> None:
    assert results["gemma3"]["refusal"] == (
        "lookahead is on and SmartGen cannot look ahead in Gemma3ForCausalLM: its layers are "
        "Gemma3DecoderLayer with Gemma3Attention; allowed are the layers of Llama, Qwen2, Qwen3 "
        "and Gemma-3, or lookahead false"
    )


@MODELS
def test_a_query_of_another_kind_fails_the_request(results: dict[str, Any], kind: str) -> None:
    cause = "lookahead does not compute the query that layer 7 has"
    assert results[kind]["alarm"] == [cause, cause]


def _run(model: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    host = Path(__file__).with_name("model_host.py")
    ended = subprocess.run(
        [sys.executable, host, model],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result
