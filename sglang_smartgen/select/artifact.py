"""Artifacts: what calibration learned of one model for one selector, in one safetensors file.

The tensors are named `<name>.<layer>` and have the model's KV heads first, so that a
tensor-parallel rank takes its own rows. The manifest of the sealed file says which model and text
they are from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from sglang_smartgen.core.sealed import Seal
from sglang_smartgen.select.shape import KVShape

FORMAT = 2
_SAMPLES = 256  # pieces of each weight file that go into a model's hash
_SAMPLE_BYTES = 4096
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Written by tools on every save or load; they change no number of the model.
_IGNORED_CONFIG = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


class ArtifactError(ValueError):
    """An artifact that cannot be used; its text is one sentence for the user."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where an artifact is from. `layers` and the heads are the whole model's.

    parameters: the options it was made with (`Selector.resolve`). text_hash: of the calibration
    text. created: ISO 8601 time.
    """

    format: int = FORMAT
    selector: str
    model_hash: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    parameters: dict[str, Any]
    text_hash: str
    created: str


class Artifact(msgspec.Struct, frozen=True):
    """A manifest and the tensors `<name>.<layer>` of the whole model."""

    manifest: Manifest
    tensors: dict[str, Tensor]

    def layers(self) -> list[int]:
        """Return the layers that have tensors, ascending."""
        return sorted({_split(key)[1] for key in self.tensors})

    def tensor(self, name: str, layer: int, first_kv_head: int, kv_heads: int) -> Tensor:
        """Return the rows of KV heads `[first_kv_head, first_kv_head + kv_heads)`.

        Raises ArtifactError when the layer or a head is not there.
        """
        whole = self.tensors.get(f"{name}.{layer}")
        if whole is None:
            made = ", ".join(map(str, self.layers()))
            raise ArtifactError(
                f"the artifact has no {name} of layer {layer}; it has layers {made}"
            )
        if first_kv_head + kv_heads > whole.shape[0]:
            raise ArtifactError(
                f"the artifact has {whole.shape[0]} KV heads; this rank needs heads "
                f"{first_kv_head} to {first_kv_head + kv_heads - 1}"
            )
        return whole[first_kv_head : first_kv_head + kv_heads]


def model_hash(folder: Path) -> str:
    """Return a hash of the model in `folder` (Hugging Face layout), 32 hex digits.

    It covers `config.json` and, of every weight file, its name, size and 256 evenly spaced pieces
    of 4 KiB: other weights of the same size are found without reading hundreds of gigabytes.
    Raises ArtifactError when there is no readable `config.json`.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not valid JSON"
        raise ArtifactError(f"model folder {folder}: config.json: {cause}") from None
    kept = {key: config[key] for key in sorted(config) if key not in _IGNORED_CONFIG}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        last = max(0, size - _SAMPLE_BYTES)
        with path.open("rb") as file:
            for start in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


_SEAL = Seal(
    noun="artifact",
    command="smartgen calibrate",
    key="smartgen",
    manifest=Manifest,
    format=FORMAT,
    error=ArtifactError,
)


def write_artifact(path: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """Write the file, whole or not at all.

    Raises ArtifactError when there is no tensor, a key is not `<name>.<layer>`, a layer is
    outside the model, or a first dimension is not the model's KV heads.
    """
    _check_tensors(manifest, tensors)
    _SEAL.write(path, manifest, tensors)


def read_artifact(path: Path) -> Artifact:
    """Read an artifact. Raises ArtifactError, one sentence, for a foreign or damaged file."""
    manifest, tensors = _SEAL.read(path)
    _check_tensors(manifest, tensors)
    return Artifact(manifest, tensors)


def check_artifact(
    artifact: Artifact,
    *,
    selector: str,
    shape: KVShape,
    model_hash: str | None,
    needed_layers: Collection[int] = (),
) -> None:
    """Raise ArtifactError, one sentence, unless `artifact` fits selector and model.

    `shape` has the whole model's heads. `model_hash` None skips the comparison of the weights.
    `needed_layers` are those that will be selected from, where the caller knows them.
    """
    manifest = artifact.manifest
    wanted: dict[str, object] = {
        "selector": selector,
        "layers": shape.layers,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    for field, value in wanted.items():
        if getattr(manifest, field) != value:
            raise ArtifactError(
                f"the artifact was made for {field} {getattr(manifest, field)}; here it is {value}"
            )
    if model_hash is not None and manifest.model_hash != model_hash:
        raise ArtifactError(
            f"the artifact was made for a model with hash {manifest.model_hash}; "
            f"this model has {model_hash}"
        )
    missing = sorted(set(needed_layers) - set(artifact.layers()))
    if missing:
        raise ArtifactError(f"the artifact lacks layers {', '.join(map(str, missing))}")


def _check_tensors(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    if not tensors:
        raise ArtifactError("the artifact has no tensors")
    for key, value in tensors.items():
        name, layer = _split(key)
        if not name or not 0 <= layer < manifest.layers:
            raise ArtifactError(
                f"the artifact has a tensor {key!r}; allowed is <name>.<layer> "
                f"with layers 0 to {manifest.layers - 1}"
            )
        if value.dim() < 1 or value.shape[0] != manifest.kv_heads:
            raise ArtifactError(
                f"the artifact's tensor {key} is {list(value.shape)}; its first dimension must be "
                f"the model's {manifest.kv_heads} KV heads"
            )


def _split(key: str) -> tuple[str, int]:
    name, _, layer = key.rpartition(".")
    return (name, int(layer)) if layer.isdecimal() else (name, -1)
