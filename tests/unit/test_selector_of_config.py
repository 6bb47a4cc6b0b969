"""The selector that a configuration names: with its artifact, or one sentence why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest
import select_cases as cases
import torch

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.selectors import load_selector
from sglang_smartgen.select import KVShape
from sglang_smartgen.select.artifact import model_hash, write_artifact

WHOLE = cases.WHOLE


def facts_of(shape: KVShape = WHOLE) -> ModelFacts:
    return ModelFacts(
        geometry=KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, torch.float32),
        shape=shape,
        keys=[],
        values=[],
        req_to_token=torch.empty(0),
        tp_size=1,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    return folder


@pytest.fixture
def artifact(model: Path, tmp_path: Path) -> Path:
    made = cases.artifact_of("infinigen-channels")
    assert made is not None
    path = tmp_path / "made.safetensors"
    manifest = msgspec.structs.replace(made.manifest, model_hash=model_hash(model))
    write_artifact(path, manifest, made.tensors)
    return path


def test_an_artifact_of_this_model_is_used(model: Path, artifact: Path) -> None:
    config = SmartGenConfig(selector="infinigen", artifact=str(artifact))
    assert load_selector(config, facts_of(), str(model)).name == "infinigen"


def test_options_reach_the_selector(model: Path) -> None:
    config = SmartGenConfig(selector="hata", selector_options={"bits": 64})
    assert load_selector(config, facts_of(), str(model)).metadata_width == 64 // 32 + 1


def test_what_does_not_fit_is_one_sentence(model: Path, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    wide = msgspec.structs.replace(WHOLE, layers=6)
    given = str(artifact)
    for config, shape, folder, sentence in [
        (SmartGenConfig(selector="infinigen"), WHOLE, model, "it needs the key artifact"),
        (SmartGenConfig(selector="hata", artifact=given), WHOLE, model, "made for selector"),
        (SmartGenConfig(selector="infinigen", artifact=given), wide, model, "made for layers 4"),
        (
            SmartGenConfig(selector="infinigen", artifact=given),
            WHOLE,
            tmp_path / "other",
            "made for a model with hash",
        ),
        (SmartGenConfig(artifact="/nowhere"), WHOLE, model, "No such file"),
        (
            SmartGenConfig(selector_options={"bit": 64}),
            WHOLE,
            model,
            "selector hata has no option 'bit'",
        ),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            load_selector(config, facts_of(shape), str(folder))


def test_random_codes_of_wide_heads_are_warned_of(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = msgspec.structs.replace(WHOLE, head_dim=256)
    with caplog.at_level(logging.WARNING):
        load_selector(SmartGenConfig(selector="hata"), facts_of(wide), str(model))
        assert "head_dim 256" in caplog.text
        caplog.clear()
        load_selector(SmartGenConfig(selector="hata"), facts_of(), str(model))
        assert caplog.text == ""
