"""Recordings of what requests select in decode: one .npz a request, written by D.

The folder is a server's environment variable, so that recording is never on by accident; the name
comes with the request. `smartgen profile` adds recordings up, order `oracle` replays one.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RECORD_DIR_ENV = "SMARTGEN_RECORD_DIR"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RecordingError(ValueError):
    """A recording that cannot be written or read; its text is one sentence for the user."""


def check_folder() -> Path:
    """The folder of recordings. Raises RecordingError when the server was not given one."""
    folder = os.environ.get(RECORD_DIR_ENV, "")
    if not folder or not Path(folder).is_dir():
        raise RecordingError(
            f"{RECORD_DIR_ENV} is {folder!r}; to record or replay selections it must name a folder "
            "that exists"
        )
    return Path(folder)


def path_of(name: str) -> Path:
    """Where the recording `name` is. Raises RecordingError for a name that is no file name."""
    if not _NAME.fullmatch(name):
        raise RecordingError(
            f"recording is {name!r}; allowed are letters, digits, dot, dash and underscore"
        )
    return check_folder() / f"{name}.npz"


def of_rank(name: str, rank: int, ranks: int) -> str:
    """The recording of one rank's KV heads; with one rank, or without a name, the name itself."""
    return f"{name}.rank{rank}" if name and ranks > 1 else name


def write(name: str, *, counts: Tensor, **facts: object) -> None:
    """Write one recording: counts int32 [sparse_layers, kv_heads, prompt_len], and plain facts.

    Written under another name first, so that a reader never sees half of it.
    """
    target = path_of(name)
    part = target.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, counts=counts.numpy(), prompt_len=counts.shape[-1], **facts)  # type: ignore[arg-type]
    part.replace(target)


def read_counts(name: str) -> Tensor:
    """The counts of a recording, int32 [sparse_layers, kv_heads, prompt_len].

    Raises RecordingError when there is none or it is damaged.
    """
    path = path_of(name)
    try:
        with np.load(path, allow_pickle=False) as content:
            return torch.from_numpy(content["counts"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise RecordingError(f"recording {path.name} cannot be read: {error}") from None
