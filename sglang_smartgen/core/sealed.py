"""Sealed files: tensors with a manifest and a digest over both, in one safetensors file.

The digest finds a damaged file, which safetensors alone would read without a word. A file is
written under a temporary name and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

M = TypeVar("M", bound=msgspec.Struct)


class Seal(msgspec.Struct, Generic[M], frozen=True):
    """One kind of sealed file.

    noun: what messages call it. command: the command that writes it. key: the manifest's name in
    the file. manifest: its type, with a field `format`. format: the one that is read. error: what
    is raised for a file that cannot be used, a ValueError with one sentence.
    """

    noun: str
    command: str
    key: str
    manifest: type[M]
    format: int
    error: type[ValueError]

    def write(self, path: Path, manifest: M, tensors: dict[str, Tensor]) -> None:
        """Write `path`, whole or not at all. Raises OSError as the file system does."""
        from safetensors.torch import save

        kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        written = msgspec.json.encode(manifest).decode()
        data = save(kept, metadata={self.key: written, "digest": _digest(written, kept)})
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, path: Path) -> tuple[M, dict[str, Tensor]]:
        """Return manifest and tensors. Raises `error` for a foreign or damaged file."""
        from safetensors import SafetensorError, safe_open

        name = f"{self.noun} {path}"
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise self.error(f"{name}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise self.error(f"{name} is damaged or no safetensors file: {error}") from None
        if self.key not in about:
            raise self.error(f"{name} is not one of `{self.command}`: it has no manifest")
        manifest = self._manifest(about[self.key], name)
        if about.get("digest") != _digest(about[self.key], tensors):
            raise self.error(f"{name} is damaged: its contents do not match its digest")
        return manifest, tensors

    def _manifest(self, written: str, name: str) -> M:
        try:
            # The format first: the fields of another one may be others.
            found = msgspec.json.decode(written, type=dict[str, object]).get("format")
            if found != self.format:
                raise self.error(f"{name} has format {found}; this version reads {self.format}")
            return msgspec.json.decode(written, type=self.manifest)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self.error(f"{name} has a damaged manifest: {error}") from None


def _digest(manifest: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(manifest.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name}:{value.dtype}:{list(value.shape)};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
