"""LongBench's items from a folder with one JSONL file a task, or from the hub's data.zip.

Every line is checked before anything starts; what is wrong is one DataError with file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench.tasks import plain_name, task_of, tasks
from sglang_smartgen.report.model_cache import cache_root

HUB_REPOSITORY, HUB_FILE = "THUDM/LongBench", "data.zip"
HUB = "hub"


class DataError(ConfigError):
    """A data file that cannot be used; one sentence with file and line."""


@dataclass(frozen=True)
class Item:
    """One line of a task's file. length: words, as LongBench counted them."""

    task: str
    line: int
    id: str
    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class TaskFile:
    """The items of one task and the SHA-256 of the file they came from."""

    name: str
    sha256: str
    items: tuple[Item, ...]


def load(source: str, names: list[str] | None) -> list[TaskFile]:
    """The tasks `names` (None: all that are there) of a folder, or of the hub for `hub`.

    Raises DataError for missing and malformed data, ConfigError for an unknown task.
    """
    folder = hub_folder() if source == HUB else Path(source)
    for name in names or ():
        task_of(name)
    if not folder.is_dir():
        raise DataError(f"--data is {source}; allowed is a folder with TASK.jsonl files, or {HUB}")
    there = [file.stem for file in folder.glob("*.jsonl") if plain_name(file.stem) in tasks()]
    if names is None:
        if not there:
            raise DataError(f"{folder} has no file TASK.jsonl of a task that LongBench knows")
        order = list(tasks())
        names = sorted(there, key=lambda name: (order.index(plain_name(name)), name))
    return [load_task(folder / f"{name}.jsonl") for name in names]


def load_task(file: Path) -> TaskFile:
    """The items of `file`, whose name is the task's. Raises DataError naming file and line."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{file}:1: the file is empty; expected is one JSON object a line")
    items = tuple(_item(file, number, line) for number, line in enumerate(lines, start=1))
    return TaskFile(file.stem, hashlib.sha256(content).hexdigest(), items)


def hub_folder() -> Path:
    """The folder of LongBench's files, fetched from the hub into the cache the first time.

    Raises DataError when they cannot be had.
    """
    target = cache_root() / "longbench"
    if target.is_dir():
        return target
    try:
        from huggingface_hub import hf_hub_download

        archive = hf_hub_download(HUB_REPOSITORY, HUB_FILE, repo_type="dataset")
    except Exception as error:  # its errors have no common base
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"LongBench cannot be fetched from the hub ({reason}); "
            f"unpack {HUB_FILE} of the data set {HUB_REPOSITORY} and name its folder in --data"
        ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".longbench-", dir=target.parent))
    try:
        _unpack(Path(archive), work)
        work.chmod(0o755)  # mkdtemp makes it private
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first; its copy is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _unpack(archive: Path, folder: Path) -> None:
    """The JSONL files of `archive` without their folders."""
    try:
        with zipfile.ZipFile(archive) as source:
            for name in source.namelist():
                if name.endswith(".jsonl"):
                    (folder / Path(name).name).write_bytes(source.read(name))
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}") from None
    if not any(folder.iterdir()):
        raise DataError(f"{archive} has no .jsonl file")


def _item(file: Path, number: int, line: bytes) -> Item:
    """The item of one line. Raises DataError with what is wrong with it."""

    def refuse(what: str) -> DataError:
        return DataError(f"{file}:{number}: {what}")

    try:
        value = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError too
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not UTF-8"
        raise refuse(f"not a JSON object ({reason})") from None
    if not isinstance(value, dict):
        raise refuse(f"not a JSON object but {_kind(value)}")
    for name, (allowed, what) in _FIELDS.items():
        if name not in value:
            raise refuse(f"field '{name}' is missing")
        if not isinstance(value[name], allowed) or isinstance(value[name], bool):
            raise refuse(f"field '{name}' is {_kind(value[name])}; expected is {what}")
    for name in ("answers", "all_classes"):
        if not all(isinstance(entry, str) for entry in value[name] or ()):
            raise refuse(f"field '{name}' has an entry that is no text")
    if not value["answers"]:
        raise refuse("field 'answers' is empty; expected is at least one")
    if plain_name(value["dataset"]) != plain_name(file.stem):
        raise refuse(f"field 'dataset' is {value['dataset']!r}; the file is {file.name}")
    metric = task_of(file.stem).metric
    if metric == "classification" and not value["all_classes"]:
        raise refuse("field 'all_classes' is empty; the task needs the names of all classes")
    if metric == "retrieval":
        for answer in value["answers"]:
            if not re.search(r"Paragraph \d+", answer):
                raise refuse(f"answer is {answer!r}; the task needs 'Paragraph N'")
    return Item(
        task=file.stem,
        line=number,
        id=value["_id"],
        input=value["input"],
        context=value["context"],
        answers=tuple(value["answers"]),
        length=value["length"],
        classes=tuple(value["all_classes"] or ()),
    )


_FIELDS: dict[str, tuple[Any, str]] = {
    "input": (str, "a text"),
    "context": (str, "a text"),
    "answers": (list, "a list of texts"),
    "length": (int, "a number of words"),
    "dataset": (str, "a text"),
    "language": (str, "a text"),
    "all_classes": ((list, type(None)), "a list of texts or null"),
    "_id": (str, "a text"),
}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
