"""The cells of `smartgen bench network`, their order, and the file that makes a run resumable.

A cell is one measurement: a batch of requests in one mode at one rate in one round. The file holds
one JSON line a request; all lines of a cell are written at once, so a cell is there or it is not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_smartgen.config import ConfigError

STOCK, FULL = "stock", "full"
MODES: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    FULL: {"mode": "full"},
    "partial": {"mode": "partial"},
    "proactive_only": {"mode": "proactive_only"},
    "smartgen": {"mode": "smartgen"},
    "no_profile": {"mode": "smartgen", "order": "sequential"},
    "no_parallel": {"mode": "smartgen", "parallel_lanes": False},
    "no_speculation": {"mode": "smartgen", "speculative_ratio": 0.0},
}
"""A request's own settings by mode; None: a pair without SmartGen."""
FILLS = ("smartgen", "no_profile", "no_parallel")
ADAPTIVE = "adaptive"
Fill = float | str | None
"""Share of all blocks a step (credit `fixed`), "adaptive", or None in a mode without fill."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. mbit: None = not shaped. ratio: None for stock, which selects nothing."""

    mode: str
    mbit: int | None
    prompt_tokens: int
    batch: int
    ratio: float | None
    speculative_ratio: Fill
    steps: int
    blocks_per_layer: int
    round: int

    def overrides(self) -> dict[str, Any] | None:
        """`custom_params.smartgen` of its requests; None for stock."""
        own = MODES[self.mode]
        if own is None:
            return None
        found = {**own, "ratio": self.ratio}
        if isinstance(self.speculative_ratio, float):
            found |= {"credit": "fixed", "speculative_ratio": self.speculative_ratio}
        elif self.speculative_ratio == ADAPTIVE:
            found["credit"] = ADAPTIVE
        return found

    def name(self) -> str:
        """A few words for progress lines."""
        rate = "unshaped" if self.mbit is None else f"{self.mbit} Mbit/s"
        text = f"round {self.round + 1}, {rate}, {self.mode}, {self.prompt_tokens} tokens"
        if self.batch > 1:
            text += f" x {self.batch}"
        if self.ratio is not None:
            text += f", ratio {self.ratio:g}"
        if isinstance(self.speculative_ratio, float):
            text += f", fill {self.speculative_ratio:g}"
        return text


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measures: every combination of these."""

    modes: Sequence[str]
    mbit: Sequence[int | None]
    prompt_tokens: Sequence[int]
    batch: Sequence[int]
    ratio: Sequence[float]
    fill: Sequence[float | str]
    steps: int
    blocks_per_layer: int
    rounds: int

    def cells(self) -> list[Cell]:
        """All cells in the order they run: rounds of all rates, within a rate of all modes.

        `full` comes first on each rate: P learns the rate from its writes, and only then can it
        choose what fits behind a prefill. The other modes are turned by one each round.
        """
        found: list[Cell] = []
        for number in range(self.rounds):
            for mbit in self.mbit:
                for prompt_tokens, batch in itertools.product(self.prompt_tokens, self.batch):
                    for mode in self._turned(number):
                        found += self._of_mode(mode, mbit, prompt_tokens, batch, number)
        return found

    def _turned(self, number: int) -> list[str]:
        first = [mode for mode in self.modes if mode == FULL]
        rest = [mode for mode in self.modes if mode != FULL]
        turn = number % len(rest) if rest else 0
        return [*first, *rest[turn:], *rest[:turn]]

    def _of_mode(
        self, mode: str, mbit: int | None, prompt_tokens: int, batch: int, number: int
    ) -> list[Cell]:
        ratios: Sequence[float | None] = [None] if mode == STOCK else self.ratio
        fills: Sequence[Fill] = self.fill if mode in FILLS else [None]
        return [
            Cell(
                mode=mode,
                mbit=mbit,
                prompt_tokens=prompt_tokens,
                batch=batch,
                ratio=ratio,
                speculative_ratio=fill,
                steps=self.steps,
                blocks_per_layer=self.blocks_per_layer,
                round=number,
            )
            for ratio, fill in itertools.product(ratios, fills)
        ]


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell that a line of the file belongs to. Raises KeyError for another file's line."""
    return Cell(**{field: row[field] for field in Cell.__struct_fields__})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of this benchmark; none when there is no file.

    A last line that was cut off is taken from the file. Raises ConfigError for any other line that
    is not one of ours.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            cell_of(row)
        except (ValueError, KeyError, TypeError):
            if number == len(lines) - 1 and not line.endswith(b"\n"):
                path.write_bytes(b"".join(lines[:number]))
                break
            raise ConfigError(
                f"{path}, line {number + 1}: not a line of smartgen bench network"
            ) from None
        rows.append(row)
    return rows


def done_cells(rows: Iterable[dict[str, Any]]) -> set[Cell]:
    """Cells of which every request has a line, failed or not."""
    counts: dict[Cell, int] = {}
    for row in rows:
        cell = cell_of(row)
        counts[cell] = counts.get(cell, 0) + 1
    return {cell for cell, count in counts.items() if count >= cell.batch}


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add the lines of one cell in one write."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


# Values of the flags ------------------------------------------------------------------------


def parse_rates(text: str) -> list[int | None]:
    """`none,50,20` or `unshaped,...`; ConfigError for anything else."""
    found: list[int | None] = []
    for part in _parts(text):
        if part in ("none", "unshaped", "0"):
            found.append(None)
        elif part.isdigit():
            found.append(int(part))
        else:
            found = []
            break
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--mbit is {text!r}; allowed is a list of whole numbers and `none`")
    return found


def parse_counts(flag: str, text: str) -> list[int]:
    """`512,2048`; ConfigError unless all are whole numbers of at least 1."""
    parts = _parts(text)
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"{flag} is {text!r}; allowed is a list of whole numbers from 1 on")
    return list(dict.fromkeys(map(int, parts)))


def parse_ratios(text: str) -> list[float]:
    """`0.1,0.2`; ConfigError unless all are above 0 and at most 1."""
    found = _numbers(text)
    if not found or not all(0 < value <= 1 for value in found):
        raise ConfigError(f"--ratio is {text!r}; allowed is a list of numbers above 0, at most 1")
    return found


def parse_fill(text: str) -> list[float | str]:
    """`adaptive,0.05,0.1`; ConfigError for anything else."""
    parts = _parts(text)
    shares = _numbers(",".join(part for part in parts if part != ADAPTIVE))
    if (
        not parts
        or len(shares) + parts.count(ADAPTIVE) < len(parts)
        or not all(0 < share <= 1 for share in shares)
    ):
        raise ConfigError(
            f"--speculative-ratio is {text!r}; allowed is a list of numbers above 0, at most 1, "
            "and `adaptive`"
        )
    found: list[float | str] = [part if part == ADAPTIVE else float(part) for part in parts]
    return list(dict.fromkeys(found))


def parse_modes(text: str) -> list[str]:
    """`stock,full`; ConfigError for an unknown mode or one named twice."""
    modes = _parts(text)
    if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(MODES):
        raise ConfigError(
            f"--modes is {text!r}; allowed is a list of {', '.join(MODES)}, each once"
        )
    return modes


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in _parts(text)))
    except ValueError:
        return []
