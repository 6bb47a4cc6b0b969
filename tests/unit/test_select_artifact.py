"""Artifacts: written whole, read back equal, and refused with one sentence when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_smartgen.core import sealed
from sglang_smartgen.select.artifact import (
    Artifact,
    ArtifactError,
    Manifest,
    check_artifact,
    model_hash,
    read_artifact,
    write_artifact,
)
from sglang_smartgen.select.shape import KVShape

SHAPE = KVShape(layers=4, q_heads=6, kv_heads=3, head_dim=8, scaling=1.0)


def manifest(**changes: object) -> Manifest:
    plain = Manifest(
        selector="hata",
        model_hash="aa",
        layers=4,
        q_heads=6,
        kv_heads=3,
        head_dim=8,
        parameters={"bits": 32},
        text_hash="bb",
        created="2026-01-01T00:00:00Z",
    )
    return msgspec.structs.replace(plain, **changes)


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "centre.2": torch.randn(3, 8, generator=made),
        "centre.3": torch.randn(8, 3, generator=made).T,  # not contiguous
        "hash.2": torch.randint(-127, 128, (3, 8, 32), generator=made, dtype=torch.int8),
        "hash.3": torch.randint(-127, 128, (3, 8, 32), generator=made, dtype=torch.int8),
    }


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_artifact(path, manifest(), tensors())
    found = read_artifact(path)
    assert found.manifest == manifest() and found.layers() == [2, 3]
    assert found.tensors.keys() == tensors().keys()
    for key, value in tensors().items():
        assert found.tensors[key].dtype == value.dtype and torch.equal(found.tensors[key], value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    check_artifact(found, selector="hata", shape=SHAPE, model_hash="aa", needed_layers=[2, 3])
    check_artifact(found, selector="hata", shape=SHAPE, model_hash=None)


def test_a_rank_takes_its_own_heads() -> None:
    whole = Artifact(manifest(), tensors())
    both = [whole.tensor("hash", 3, first, count) for first, count in ((0, 1), (1, 2))]
    assert torch.equal(torch.cat(both), tensors()["hash.3"])
    with pytest.raises(ArtifactError, match="has 3 KV heads; this rank needs heads 2 to 3"):
        whole.tensor("hash", 3, 2, 2)
    with pytest.raises(ArtifactError, match="no hash of layer 1; it has layers 2, 3"):
        whole.tensor("hash", 1, 0, 1)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    write_artifact(path, manifest(), tensors())

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(sealed.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_artifact(path, manifest(selector="other"), tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert read_artifact(path).manifest.selector == "hata"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "has no tensors"),
        ({"hash": torch.zeros(3)}, "has a tensor 'hash'; allowed is <name>.<layer>"),
        ({"hash.4": torch.zeros(3)}, "has a tensor 'hash.4'; allowed is <name>.<layer>"),
        ({"hash.2": torch.zeros(2, 8)}, r"hash.2 is \[2, 8\]; its first dimension must be"),
    ],
)
def test_tensors_that_do_not_fit_are_not_written(
    tmp_path: Path, change: dict[str, torch.Tensor], sentence: str
) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        write_artifact(tmp_path / "a.safetensors", manifest(), change)
    assert not list(tmp_path.iterdir())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _rewrite(**metadata: str) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path), path, metadata=metadata)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_flip, "is damaged: its contents do not match its digest"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged or no safetensors"),
        (lambda path: path.write_bytes(b""), "is damaged or no safetensors file"),
        (lambda path: path.write_text("hello, this is a text"), "is damaged or no safetensors"),
        (lambda path: path.unlink(), "No such file"),
        (_rewrite(format="pt"), "it has no manifest"),
        (_rewrite(smartgen="{"), "has a damaged manifest"),
        (_rewrite(smartgen='{"format": 2, "selector": 3}'), "has a damaged manifest"),
        (
            _rewrite(smartgen=msgspec.json.encode(manifest(format=9)).decode()),
            "has format 9; this version reads 2",
        ),
    ],
)
def test_a_damaged_or_foreign_file_is_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    path = tmp_path / "a.safetensors"
    write_artifact(path, manifest(), tensors())
    damage(path)
    with pytest.raises(ArtifactError, match=sentence) as caught:
        read_artifact(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"selector": "infinigen"}, "made for selector infinigen; here it is hata"),
        ({"kv_heads": 1}, "made for kv_heads 1; here it is 3"),
        ({"q_heads": 9}, "made for q_heads 9; here it is 6"),
        ({"head_dim": 64}, "made for head_dim 64; here it is 8"),
        ({"layers": 5}, "made for layers 5; here it is 4"),
        ({"model_hash": "cc"}, "made for a model with hash cc; this model has aa"),
    ],
)
def test_an_artifact_of_another_model_is_one_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        check_artifact(
            Artifact(manifest(**changes), tensors()),
            selector="hata",
            shape=SHAPE,
            model_hash="aa",
        )


def test_a_layer_that_was_not_calibrated_is_named() -> None:
    with pytest.raises(ArtifactError, match="lacks layers 1"):
        check_artifact(
            Artifact(manifest(), tensors()),
            selector="hata",
            shape=SHAPE,
            model_hash=None,
            needed_layers=[1, 2],
        )


def test_model_hash_follows_config_and_weights_and_no_more(tmp_path: Path) -> None:
    def model(name: str, config: dict[str, object], weights: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(name)
        return folder

    config: dict[str, object] = {"hidden": 4, "rope": 10}
    weights = bytes(3_000_000)
    changed = bytearray(weights)
    changed[-1] = 1
    base = model_hash(model("base", config, weights))
    assert len(base) == 32
    assert model_hash(model("same", {**config, "dtype": "float32"}, weights)) == base
    others = {
        model_hash(model("rope", {**config, "rope": 20}, weights)),
        model_hash(model("weights", config, bytes(changed))),
        model_hash(model("size", config, bytes(3_000_001))),
        base,
    }
    assert len(others) == 4
    with pytest.raises(ArtifactError, match=r"config\.json: No such file"):
        model_hash(tmp_path)
