"""The folder of a run: config.json, predictions.jsonl, scores.json.

A prediction is written as one whole line and synced before the next is asked for, so that a run
that was killed at any moment goes on where it stopped: what follows the last line end is cut off.
config.json is replaced in one step. A lock keeps two runs out of one folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglang_smartgen.calibrate.folder_lock import InUseError, lock_folder
from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench.arms import Arm
from sglang_smartgen.report.longbench.data import DataError, TaskFile

Key = tuple[str, int, str]
"""Task, line in its file, arm."""

_FIELDS = (
    "task",
    "line",
    "_id",
    "arm",
    "pred",
    "tokens",
    "reference_logprobs",
    "reference_preferred",
)


class RunFolder:
    """The state of one run on disk; a context manager that holds the folder's lock.

    Raises ConfigError when the folder belongs to a run with other settings, DataError for a file
    that something else wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.predictions: dict[Key, dict[str, Any]] = {}
        self._lock: int | None = None
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._lock = lock_folder(self.path, ".lock")
        except OSError as error:
            raise ConfigError(f"--out is {self.path}: {error.strerror}") from None
        except InUseError:
            raise ConfigError(f"--out is {self.path}; another run is using it") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def open(
        self, settings: Mapping[str, Any], arms: Sequence[Arm], data: Sequence[TaskFile]
    ) -> None:
        """Take up a run with these settings, or begin it. New arms and tasks may be added."""
        now = {
            "settings": dict(settings),
            "arms": {arm.name: arm.to_json() for arm in arms},
            "tasks": {task.name: {"sha256": task.sha256} for task in data},
        }
        file = self.path / "config.json"
        if file.is_file():
            before = _read_json(file)
            for section, values in now.items():
                known = before.setdefault(section, {})
                for name, value in values.items():
                    if name in known and known[name] != value:
                        raise ConfigError(
                            f"{self.path} holds a run whose {section[:-1]} '{name}' was "
                            f"{json.dumps(known[name])}, now it is {json.dumps(value)}; "
                            "give the same, or another folder in --out"
                        )
                    known[name] = value
            now = before
        self._read_predictions()
        self.write("config.json", now)
        self._file = os.open(
            self.path / "predictions.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def append(self, prediction: dict[str, Any]) -> None:
        """Keep one prediction; when this returns it is on the disk."""
        if self._file is None:
            raise RuntimeError("the folder is not open")
        line = (json.dumps(prediction) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self.predictions[_key(prediction)] = prediction

    def write(self, name: str, value: Any) -> None:
        """Replace the JSON file `name` in one step."""
        work = self.path / f".{name}"
        with work.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        work.replace(self.path / name)

    def _read_predictions(self) -> None:
        file = self.path / "predictions.jsonl"
        self.predictions.clear()
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                prediction = json.loads(line)
                missing = [name for name in _FIELDS if name not in prediction]
            except (ValueError, TypeError):
                raise DataError(f"{file}:{number}: not a JSON object") from None
            if missing:
                raise DataError(f"{file}:{number}: field '{missing[0]}' is missing")
            key = _key(prediction)
            if key in self.predictions:
                raise DataError(f"{file}:{number}: the same item and arm as in a line before")
            self.predictions[key] = prediction
        if len(whole) < len(content):  # a run was killed while it wrote
            os.truncate(file, len(whole))


def _key(prediction: Mapping[str, Any]) -> Key:
    return prediction["task"], prediction["line"], prediction["arm"]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value
