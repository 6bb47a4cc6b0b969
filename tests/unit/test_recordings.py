"""Recordings of selections: written whole, read back, and refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_smartgen.core import recordings
from sglang_smartgen.core.recordings import RECORD_DIR_ENV, RecordingError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RECORD_DIR_ENV, str(tmp_path))
    return tmp_path


def counts() -> torch.Tensor:
    return torch.arange(2 * 3 * 5, dtype=torch.int32).view(2, 3, 5)


def test_what_is_written_is_read_and_facts_stay_beside_it(folder: Path) -> None:
    recordings.write("run-1.a_B", counts=counts(), steps=7, selector="hata", ratio=0.5)
    assert [path.name for path in folder.iterdir()] == ["run-1.a_B.npz"]
    back = recordings.read_counts("run-1.a_B")
    assert torch.equal(back, counts()) and back.dtype == torch.int32
    with np.load(folder / "run-1.a_B.npz", allow_pickle=False) as content:
        assert (int(content["prompt_len"]), int(content["steps"])) == (5, 7)
        assert str(content["selector"]) == "hata"


def test_a_second_recording_of_the_name_replaces_the_first(folder: Path) -> None:
    recordings.write("x", counts=counts())
    recordings.write("x", counts=counts() + 1)
    assert torch.equal(recordings.read_counts("x"), counts() + 1)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "-x", "a b", "x" * 129, "x\n", "ü"])
def test_a_name_that_is_no_file_name_is_refused(folder: Path, name: str) -> None:
    for action in (recordings.read_counts, lambda n: recordings.write(n, counts=counts())):
        with pytest.raises(RecordingError, match=r"recording is .*; allowed are letters, digits"):
            action(name)
    assert list(folder.iterdir()) == []


def test_without_a_folder_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "/nowhere/at/all"):
        if value is None:
            monkeypatch.delenv(RECORD_DIR_ENV, raising=False)
        else:
            monkeypatch.setenv(RECORD_DIR_ENV, value)
        with pytest.raises(RecordingError, match=f"{RECORD_DIR_ENV} is .* a folder that exists"):
            recordings.check_folder()


def test_a_recording_that_is_missing_or_damaged_is_named(folder: Path) -> None:
    recordings.write("good", counts=counts())
    content = (folder / "good.npz").read_bytes()
    (folder / "cut.npz").write_bytes(content[: len(content) // 2])
    (folder / "text.npz").write_text("no archive")
    (folder / "empty.npz").write_bytes(b"")
    np.savez(folder / "other.npz", something=np.zeros(3))
    with (folder / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(folder / "pickled.npz", counts=np.array([{}], dtype=object))
    for name in ("missing", "cut", "text", "empty", "other", "array", "pickled"):
        with pytest.raises(RecordingError, match=f"recording {name}.npz cannot be read"):
            recordings.read_counts(name)
