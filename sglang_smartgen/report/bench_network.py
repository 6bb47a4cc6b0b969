"""`smartgen bench network`: all modes beside stock SGLang at several rates of the network.

One SmartGen pair serves every mode of ours, one pair without SmartGen is `stock`; both stay up for
the whole run. Rounds go over all rates, and within a rate over all modes, so that a machine that
gets slower is slow for all of them. P's prefix cache is emptied before each measurement, D has
none, and prompts of one batch differ from the first token on.

Requests are sent by our own client and not by SGLang's `sglang.benchmark.serving`: a request needs
a name of its own (`rid`), by which D's record of it (bytes by kind, waits, steps until local) is
found, and token ids of an exact number; `--extra-request-body` is one for all requests, and its
datasets tokenize text. `smartgen bench memory` loads the servers with it, where neither is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import requests
from rich.console import Console

from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import network_cells as cells
from sglang_smartgen.report import network_pairs as pairs
from sglang_smartgen.report import prompts, shaped
from sglang_smartgen.report.client import RequestError
from sglang_smartgen.report.cluster import ClusterError
from sglang_smartgen.report.demo import kv_token_bytes
from sglang_smartgen.report.machine import machine_facts
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.network_cells import FULL, STOCK, Cell, Grid
from sglang_smartgen.report.network_report import arms, comparisons, link_ratios, show
from sglang_smartgen.report.network_time import Speed, speed_of, steps_that_fit
from sglang_smartgen.report.select_texts import held_out_texts

QUICK = {
    "modes": "stock,full,smartgen",
    "mbit": "none,50,20",
    "prompt_tokens": "2048",
    "batch": "1",
    "ratio": "0.1",
    "speculative_ratio": cells.ADAPTIVE,
    "rounds": 2,
    "steps": 64,
}
QUICK_S = 660.0  # of 12 minutes
QUICK_REST_S = 40.0  # of the rest; 20 s are for the start of Python and the end of the servers
SHAPING = "tbf on the loopback of a network namespace, MTU 1500"
DUPLEX = "htb on the loopback of a network namespace, MTU 1500, a class for each direction"
NOT_SHAPED = "none: the machine's own loopback"
TEXT = "novel Emma"
PAIR_GB = 6  # of the small model of this project, measured
APART = 977  # tokens between the beginnings of the prompts of a batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench network`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="at most 12 minutes: 2,048 tokens, unshaped, 50 and 20 Mbit/s, stock, full, smartgen",
    )
    parser.add_argument(
        "--modes", default=",".join(cells.MODES), help="of " + ", ".join(cells.MODES)
    )
    parser.add_argument(
        "--mbit", default="none,1000,100,50,20", help="rates; none = not shaped (%(default)s)"
    )
    parser.add_argument("--prompt-tokens", default="2048", help="list of lengths (%(default)s)")
    parser.add_argument("--batch", default="1", help="list: requests at once (%(default)s)")
    parser.add_argument("--ratio", default="0.1", help="list: selection ratios (%(default)s)")
    parser.add_argument(
        "--speculative-ratio",
        default=cells.ADAPTIVE,
        help="list: shares of all blocks a step (credit fixed), or adaptive (%(default)s)",
    )
    parser.add_argument(
        "--duplex",
        action="store_true",
        help="hold each direction to the rate by itself and HTTP to none (default: one bucket)",
    )
    parser.add_argument("--blocks-per-layer", type=int, help="M of the pair (default: its own)")
    parser.add_argument("--steps", type=int, default=64, help="tokens of an answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--config", default="{}", help="of the SmartGen pair: JSON or a file")
    parser.add_argument("--model", help="model folder (default: the small model of this project)")
    parser.add_argument(
        "--out",
        type=Path,
        help="a line of JSON a request; what this file has is not measured again",
    )
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when at least one request of each arm was answered, else 1.

    Raises ConfigError, ModelCacheError, ClusterError or RequestError, all with one sentence.
    """
    began = time.monotonic()
    if args.quick:
        vars(args).update(QUICK)
    grid = grid_of(args)
    if grid.mbit != [None] or shaped.possible():
        shaped.enter_adjustable(args.mbit)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(result_stream(args.format))
        log_dir = args.log_dir
        if log_dir is None:
            log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-network-"))
        deadline = began + QUICK_S if args.quick else None
        bench = Bench(args, grid, Path(log_dir), deadline)
        report = bench.run()
        if args.format == "json":
            print(json.dumps(report), file=out, flush=True)
        else:
            show(report, Console(file=out))
    return 1 if any(arm["failed"] == arm["requests"] for arm in report["arms"]) else 0


def grid_of(args: argparse.Namespace) -> Grid:
    """What the flags ask for. Raises ConfigError."""
    for flag, least in (("steps", 3), ("rounds", 1)):
        if getattr(args, flag) < least:
            raise ConfigError(f"--{flag} is {getattr(args, flag)}; it must be at least {least}")
    config = load_config(args.config)
    m = config.blocks_per_layer if args.blocks_per_layer is None else args.blocks_per_layer
    if m < 1:
        raise ConfigError(f"--blocks-per-layer is {m}; it must be at least 1")
    return Grid(
        modes=cells.parse_modes(args.modes),
        mbit=cells.parse_rates(args.mbit),
        prompt_tokens=cells.parse_counts("--prompt-tokens", args.prompt_tokens),
        batch=cells.parse_counts("--batch", args.batch),
        ratio=cells.parse_ratios(args.ratio),
        fill=cells.parse_fill(args.speculative_ratio),
        steps=args.steps,
        blocks_per_layer=m,
        rounds=args.rounds,
    )


def available_gb() -> float:
    """Memory in GB that the kernel would give to new programs."""
    import psutil

    return float(psutil.virtual_memory().available) / 1e9


def batch_prompts(body: Sequence[int], tokens: int, batch: int) -> list[list[int]]:
    """`batch` prompts of `tokens` ids of a text, read on from its start; no two begin alike."""
    found: list[list[int]] = []
    start = 0
    for _ in range(batch):
        taken = {prompt[0] for prompt in found}
        while body[start % len(body)] in taken:
            start += 1
        found.append([body[(start + at) % len(body)] for at in range(tokens)])
        start += APART
    return found


class Bench:
    """One run: its pairs, what is done already and what is left."""

    def __init__(
        self, args: argparse.Namespace, grid: Grid, log_dir: Path, deadline: float | None
    ) -> None:
        self._args, self._grid, self._deadline = args, grid, deadline
        self._console = Console(stderr=True)
        self._model = Path(args.model) if args.model else ensure_model()
        if not (self._model / "config.json").is_file():
            raise ConfigError(f"--model is {self._model}; allowed is a folder with a config.json")
        facts = json.loads((self._model / "config.json").read_text())
        self._token_bytes = kv_token_bytes(facts)
        longest = max(grid.prompt_tokens) + grid.steps
        if longest > (limit := facts.get("max_position_embeddings", longest)):
            raise ConfigError(
                f"--prompt-tokens and --steps are {longest} together, more than the {limit} "
                "positions of the model"
            )
        self._config = msgspec.to_builtins(load_config(args.config))
        self._config["blocks_per_layer"] = grid.blocks_per_layer
        tokenizer = prompts.load_tokenizer(self._model)
        text = held_out_texts()[TEXT]
        self._body = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        self._about = {
            "model": self._model.name,
            "config": self._config,
            "env": pairs.SLOW_ENV,
            "network": (DUPLEX if args.duplex else SHAPING)
            if shaped.is_adjustable()
            else NOT_SHAPED,
            "machine": machine_facts(),
        }
        self._rows: list[dict[str, Any]] = []
        if args.out is not None:
            self._rows = cells.read_rows(args.out)
            self._check_file(args.out)
        room = int(1.5 * max(grid.batch) * longest)
        self._pairs = pairs.pairs_of(
            self._model,
            self._config,
            log_dir,
            max(8192, room),
            self._say,
            decode_host=shaped.DECODE_HOST if args.duplex else None,
        )
        self._dead: dict[str, str] = {}
        self._rate: int | None = None
        self._settled = False
        self._speed = Speed()
        self._began = time.monotonic()  # of the first cell

    def run(self) -> dict[str, Any]:
        """Measure what is left; the object that `--format json` prints."""
        done = cells.done_cells(self._rows)
        # Lines of a cell that was cut off in the middle of its batch do not count.
        self._rows = [row for row in self._rows if cells.cell_of(row) in done]
        if self._args.quick and self._rows:
            self._grid = msgspec.structs.replace(self._grid, steps=self._rows[0]["steps"])
        left = [cell for cell in self._grid.cells() if cell not in done]
        if done:
            self._say(f"{len(done)} cells are in the file, {len(left)} are left")
        try:
            if left:
                self._measure(left)
        finally:
            for pair in self._pairs.values():
                pair.stop()
        found = arms(self._rows)
        return {
            **self._about,
            "links": link_ratios(found, self._token_bytes),
            "compared": comparisons(found),
            "arms": found,
        }

    def _measure(self, left: list[Cell]) -> None:
        wanted = {self._pair_name(cell) for cell in left}
        self._say(f"starting {len(wanted)} pairs")
        if (free := available_gb()) < PAIR_GB * len(wanted):
            self._say(f"only {free:.0f} GB of memory are free; a pair takes some {PAIR_GB} GB")
        pairs.start_all([pair for name, pair in self._pairs.items() if name in wanted])
        for name in wanted:
            self._warm_up(name)
        if self._deadline is not None and not self._rows:
            left = self._fitted(left)
        total = sum(self._expected(cell) for cell in left)
        self._began, spent = time.monotonic(), 0.0
        for number, cell in enumerate(left):
            if self._too_late(left, number):
                self._say(f"no time for round {cell.round + 1}")
                return
            scale = (time.monotonic() - self._began) / spent if spent else 1.0
            rest = scale * (total - spent)
            self._say(f"{number + 1} of {len(left)}, {rest / 60:.0f} min left: {cell.name()}")
            if self._no_time_for(cell):
                self._rows += pairs.failed_rows(cell, "not run: the time of --quick is over")
            else:
                self._one(cell)
            spent += self._expected(cell)

    def _one(self, cell: Cell) -> None:
        """Measure one cell and keep its rows; what fails is in them."""
        name = self._pair_name(cell)
        pair = self._pairs[name]
        try:
            if name in self._dead:
                raise ClusterError(self._dead[name])
            if cell.mbit != self._rate and shaped.is_adjustable():
                shaped.set_rate(cell.mbit, self._args.duplex)
                self._rate, self._settled = cell.mbit, False
            pairs.run_alone(pair, self._pairs.values())
            if pair.make_ready(self._prompts(pairs.WARM_UP_TOKENS, 1)[0]):
                self._warm_up(name)
                self._settled = self._settled and name == STOCK
            self._settle(cell)
            rows = pairs.measure(
                pair, cell, self._prompts(cell.prompt_tokens, cell.batch), self._token_bytes
            )
        except (ClusterError, RequestError, requests.RequestException) as error:
            cause = str(error).splitlines()[0]
            if pair.is_down:
                self._dead[name] = cause
            pair.doubt()
            rows = pairs.failed_rows(cell, cause)
        for row in rows:
            row |= self._about
        self._rows += rows
        if self._args.out is not None:
            cells.append_rows(self._args.out, rows)
        self._say("  " + pairs.outcome(rows))

    def _settle(self, cell: Cell) -> None:
        """P must have measured the rate before a mode that goes by it; `full` shows it."""
        if cell.mode in (STOCK, FULL) or self._settled:
            self._settled = self._settled or cell.mode == FULL
            return
        self._say("  P measures the network")
        pairs.settle(self._pairs["smartgen"], self._prompts(pairs.SETTLE_TOKENS, 1)[0])
        self._settled = True

    def _warm_up(self, name: str) -> None:
        self._say(f"warming up {self._pairs[name].name}")
        pairs.run_alone(self._pairs[name], self._pairs.values())
        prompt = self._prompts(pairs.WARM_UP_TOKENS, 1)[0]
        modes = [None] if name == STOCK else [cells.MODES[FULL], cells.MODES["smartgen"]]
        answers = pairs.warm_up(self._pairs[name], prompt, modes)
        self._speed = speed_of(answers[0], pairs.WARM_UP_TOKENS)

    def _fitted(self, left: list[Cell]) -> list[Cell]:
        """The cells of one --quick run with as many steps as one round has time for."""
        assert self._deadline is not None
        first = [cell for cell in left if cell.round == 0]
        steps = steps_that_fit(
            first, self._deadline - time.monotonic(), self._speed, self._token_bytes
        )
        if steps < self._grid.steps:
            self._say(f"answers of {steps} tokens, for want of time")
        self._grid = msgspec.structs.replace(self._grid, steps=steps)
        return self._grid.cells()

    def _too_late(self, left: list[Cell], number: int) -> bool:
        """Whether a later round of a --quick run begins that would not end in time."""
        cell = left[number]
        if self._deadline is None or cell.round == 0 or left[number - 1].round == cell.round:
            return False
        took = (time.monotonic() - self._began) / cell.round  # a round, so far
        return time.monotonic() + took > self._deadline

    def _no_time_for(self, cell: Cell) -> bool:
        late = 0.0 if self._deadline is None else time.monotonic() - self._deadline
        return self._deadline is not None and late + self._expected(cell) > QUICK_REST_S

    def _expected(self, cell: Cell) -> float:
        return self._speed.seconds(cell, self._token_bytes)

    def _prompts(self, tokens: int, batch: int) -> list[list[int]]:
        return batch_prompts(self._body, tokens, batch)

    @staticmethod
    def _pair_name(cell: Cell) -> str:
        return STOCK if cell.mode == STOCK else "smartgen"

    def _check_file(self, path: Path) -> None:
        """Raise ConfigError when the file is of another model, configuration or network."""
        own = {key: self._about[key] for key in ("model", "network", "config")}
        for row in self._rows:
            # M is part of a cell: one file may hold several.
            m = {"blocks_per_layer": row["blocks_per_layer"]}
            for key, value in {**own, "config": {**self._config, **m}}.items():
                if row.get(key) != value:
                    raise ConfigError(
                        f"{path} has requests with another {key}; give a file of its own"
                    )

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
