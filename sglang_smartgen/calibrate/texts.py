"""Calibration texts: files to token sequences that fit a model and a budget."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sglang_smartgen.calibrate.errors import CalibrationError

MIN_TOKENS = 256  # a shorter text has next to nothing to select from


def read_text(path: Path) -> str:
    """Return the UTF-8 text of `path`. Raises CalibrationError when it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise CalibrationError(f"TEXT {path} cannot be read: {cause}") from None


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`. Raises CalibrationError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CalibrationError(f"{folder} has no tokenizer that can be read: {reason}") from None


def start_ids(tokenizer: Any, model_type: str) -> list[int]:
    """Return the ids that a prompt of this model begins with.

    Gemma answers garbage without BOS, and a tokenizer converted from GGUF does not add it.
    """
    begin = list(tokenizer("")["input_ids"])
    bos = tokenizer.bos_token_id
    if model_type.startswith("gemma"):
        # A converted tokenizer may not even name it; it is token 2 of every Gemma-3.
        begin = begin or [2 if bos is None else int(bos)]
    return begin


def token_sequences(
    texts: dict[str, str],
    tokenizer: Any,
    begin: list[int],
    *,
    length: int,
    total: int,
) -> list[list[int]]:
    """Cut texts to sequences of at most `length` tokens, `total` in all, from every text in turn.

    `texts` are the contents by name; every sequence starts with `begin`. A rest of a text under
    MIN_TOKENS is left out. Raises CalibrationError for a text that is too short, no text, or
    numbers that do not fit.
    """
    if not texts:
        raise CalibrationError("TEXT is missing; calibration needs at least one text file")
    least = MIN_TOKENS + len(begin)
    if length < least:
        raise CalibrationError(f"--sequence-tokens is {length}; it must be at least {least}")
    if total < length:
        raise CalibrationError(
            f"--total-tokens is {total}; it must be at least --sequence-tokens, {length}"
        )
    pieces: list[list[list[int]]] = []
    for name, text in texts.items():
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) < MIN_TOKENS:
            raise CalibrationError(
                f"TEXT {name} has {len(ids)} tokens; at least {MIN_TOKENS} are needed"
            )
        step = length - len(begin)
        cuts = [begin + ids[at : at + step] for at in range(0, len(ids), step)]
        pieces.append([cut for cut in cuts if len(cut) >= least])
    chosen: list[list[int]] = []
    for row in zip_longest(*pieces):
        for piece in row:
            left = total - sum(map(len, chosen))
            if piece is not None and left >= least:
                chosen.append(piece[:left])
    return chosen


def hash_sequences(sequences: list[list[int]]) -> str:
    """Return a hash of token sequences, 32 hex digits."""
    return hashlib.sha256(json.dumps(sequences).encode()).hexdigest()[:32]
