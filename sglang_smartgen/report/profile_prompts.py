"""Which prompts `smartgen profile` runs: pieces of real texts, spread over ranges of length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.select_texts import calibration_texts


class ProfilePrompt(msgspec.Struct, frozen=True):
    """One calibration request; `name` is that of its recording and says what it depends on."""

    name: str
    data_set: str
    token_ids: list[int]


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """Parse `1024-2048,2048-4096` to half-open ranges. Raises ConfigError unless they ascend."""
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        start, _, stop = part.strip().partition("-")
        if not (start.isdecimal() and stop.isdecimal()) or int(start) >= int(stop):
            raise ConfigError(
                f"--ranges is {text!r}; allowed is a list of START-STOP in tokens, such as "
                "1024-2048,2048-4096"
            )
        if ranges and int(start) < ranges[-1][1]:
            raise ConfigError(f"--ranges is {text!r}; the ranges must ascend and not overlap")
        ranges.append((int(start), int(stop)))
    return ranges


def read_texts(given: Sequence[str]) -> list[tuple[str, str]]:
    """Read `[SET=]FILE` items to (data set, text); a file's data set is its own name by default.

    Without any, the package's calibration texts. Raises ConfigError for a file that is no text.
    """
    texts: list[tuple[str, str]] = []
    for item in given:
        name, equals, rest = item.partition("=")
        path = Path(rest if equals else item)
        try:
            texts.append((name if equals else path.stem, path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"TEXT {path} cannot be read: {cause}") from None
    return texts or list(calibration_texts().items())


def cut_prompts(
    texts: Sequence[tuple[str, list[int]]],
    ranges: Sequence[tuple[int, int]],
    *,
    per_range: int,
    settings: dict[str, Any],
) -> list[ProfilePrompt]:
    """Cut `per_range` prompts for each range, from the texts (data set, token ids) in turn.

    Their lengths spread evenly over the range. Pieces of one text follow each other, so that they
    overlap only where a text is too short. settings: what a recording depends on besides its
    prompt. Raises ConfigError when no text is long enough for a range.
    """
    prompts: list[ProfilePrompt] = []
    used = [0] * len(texts)
    turn = 0
    for start, stop in ranges:
        for i in range(per_range):
            length = start + (stop - start) * (2 * i + 1) // (2 * per_range)
            fitting = [at for at, (_, ids) in enumerate(texts) if len(ids) >= length]
            if not fitting:
                longest = max((len(ids) for _, ids in texts), default=0)
                raise ConfigError(
                    f"--ranges asks for a prompt of {length} tokens; the longest text has {longest}"
                )
            at = fitting[turn % len(fitting)]
            turn += 1
            data_set, ids = texts[at]
            begin = used[at] if used[at] + length <= len(ids) else 0
            used[at] = begin + length
            piece = ids[begin : begin + length]
            prompts.append(ProfilePrompt(_name(data_set, piece, settings), data_set, piece))
    return prompts


def _name(data_set: str, ids: list[int], settings: dict[str, Any]) -> str:
    known = json.dumps([ids, settings], sort_keys=True).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in data_set)[:40].strip("-")
    return f"{plain or 'text'}-{len(ids)}-{hashlib.sha256(known).hexdigest()[:16]}"
