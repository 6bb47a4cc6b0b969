"""The work folder of a calibration: what a stopped run leaves and the next one goes on from.

`part-L.safetensors` holds the artifact tensors of layer L, `hidden-L.safetensors` the texts as
they enter layer L. A part is written before the hidden states behind it, each under a temporary
name first; so the newest hidden states say which layers are done, whenever the run was killed.
The folder's name has a hash of everything that decides the result: another model, text or option
never goes on from it. A file lock, which dies with its process, keeps two runs apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from torch import Tensor

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.folder_lock import InUseError, lock_folder


class WorkFolder:
    """A context manager; the folder lies beside `out` and survives everything but `remove`."""

    def __init__(self, out: Path, facts: dict[str, object]) -> None:
        """Lay the folder out. `facts` is everything that decides the result."""
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path = out.parent / f".{out.name}.work-{key}"
        self._out = out
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        """Raises CalibrationError when the folder cannot be made or another run is in it."""
        try:
            self._lock = lock_folder(self.path, "lock")
        except OSError as error:
            raise CalibrationError(f"--out {self._out} cannot be written: {error}") from None
        except InUseError:
            raise CalibrationError(f"another calibration is writing {self._out}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def save(self, layer: int, tensors: dict[str, Tensor], hidden: list[Tensor]) -> None:
        """Record that `layer` is done: its artifact tensors (or none) and its outputs."""
        if tensors:
            self._write(f"part-{layer}", tensors)
        self._write(f"hidden-{layer + 1}", {str(i): x for i, x in enumerate(hidden)})
        for old in self._layers("hidden"):
            if old <= layer:
                self._file(f"hidden-{old}").unlink(missing_ok=True)

    def resume(self) -> tuple[int, list[Tensor]]:
        """Return the first layer that is not done and its inputs; (0, []) in a new folder."""
        done = self._layers("hidden")
        if not done:
            return 0, []
        hidden = self._read(f"hidden-{done[-1]}")
        return done[-1], [hidden[str(i)] for i in range(len(hidden))]

    def part(self, layer: int) -> dict[str, Tensor]:
        """Return the artifact tensors of a layer that is done."""
        return self._read(f"part-{layer}")

    def remove(self) -> None:
        """Delete the folder: the artifact is written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _layers(self, kind: str) -> list[int]:
        names = [
            path.stem.removeprefix(f"{kind}-") for path in self.path.glob(f"{kind}-*.safetensors")
        ]
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        temporary = self.path / f"{name}.tmp"
        save_file({key: value.contiguous() for key, value in tensors.items()}, temporary)
        temporary.replace(self._file(name))

    def _read(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        try:
            out: dict[str, Tensor] = load_file(self._file(name))
        except Exception as error:  # a disk's fault; safetensors has its own error class
            raise CalibrationError(
                f"{self._file(name)} of an earlier run cannot be read ({error}); "
                f"delete {self.path} to start again"
            ) from None
        return out
