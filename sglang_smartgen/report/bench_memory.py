"""`smartgen bench memory`: peak memory of P and D by mode, and load until saturation.

One pair with SmartGen and one without it are loaded by SGLang's own `sglang.benchmark.serving`, one
after the other: for each mode more and more requests at once, until output no longer grows. The
peak is the kernel's, counted anew for each load. P's prefix cache is emptied before each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_smartgen.calibrate.progress import TimeLeft
from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import memory_use, prompts, serving_load, shaped
from sglang_smartgen.report import network_cells as cells
from sglang_smartgen.report import network_pairs as pairs
from sglang_smartgen.report.bench_network import APART, TEXT
from sglang_smartgen.report.client import RequestError
from sglang_smartgen.report.machine import machine_facts
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.network_cells import STOCK
from sglang_smartgen.report.select_texts import held_out_texts

GROWTH = 1.05  # below it more requests at once bring nothing
LOAD_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench memory`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--modes", default="stock,full,smartgen", help="of bench network's modes")
    parser.add_argument("--mbit", type=int, help="rate of the network (default: not shaped)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="tokens of an answer (%(default)s)")
    parser.add_argument(
        "--concurrency", default="1,2,4,8", help="requests at once, ascending (%(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=2, help="of a load, for each at once (%(default)s)"
    )
    parser.add_argument("--ratio", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--config", default="{}", help="of the SmartGen pair: JSON or a file")
    parser.add_argument("--out", type=Path, help="append every load as a line of JSON here")
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every load was answered. Raises what the command line names."""
    modes = cells.parse_modes(args.modes)
    levels = sorted(cells.parse_counts("--concurrency", args.concurrency))
    for flag, least in (("steps", 4), ("requests", 1), ("prompt_tokens", 1)):
        if getattr(args, flag) < least:
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} is {getattr(args, flag)}; it must be at least {least}")
    cells.parse_ratios(str(args.ratio))
    config = msgspec.to_builtins(load_config(args.config))
    shaped.enter(args.mbit)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(result_stream(args.format))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-memory-")))
        bench = Bench(args, config, work)
        loads = bench.run(modes, levels)
        report = {**bench.about, "loads": loads, "modes": summary(loads)}
        if args.format == "json":
            print(json.dumps(report), file=out, flush=True)
        else:
            Console(file=out).print(table(loads))
            for mode, found in report["modes"].items():
                text = f"{mode}: most output {found['output_tokens_per_s']:.1f} tokens/s at "
                Console(file=out).print(text + f"{found['concurrency']} at once", highlight=False)
    return 1 if any(load["error"] for load in loads) else 0


class Bench:
    """One run; `about` is what every line of the file says."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any], work: Path) -> None:
        self._args, self._work = args, work
        self._console = Console(stderr=True)
        self._model = ensure_model()
        tokenizer = prompts.load_tokenizer(self._model)
        text = held_out_texts()[TEXT]
        body = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        length, most = args.prompt_tokens, max(map(int, args.concurrency.split(",")))
        starts = range(0, APART * args.requests * most, APART)
        self._texts = [
            tokenizer.decode([body[(start + at) % len(body)] for at in range(length)])
            for start in starts
        ]
        flags = ("--max-running-requests", str(max(8, most)))
        room = int(1.5 * most * (length + args.steps))
        log_dir = args.log_dir or work / "logs"
        self._pairs = pairs.pairs_of(
            self._model, config, log_dir, max(8192, room), self._say, flags
        )
        self.about = {
            "model": self._model.name,
            "config": config,
            "env": pairs.SLOW_ENV,
            "mbit": args.mbit,
            "prompt_tokens": length,
            "steps": args.steps,
            "ratio": args.ratio,
            "machine": machine_facts(),
        }

    def run(self, modes: Sequence[str], levels: Sequence[int]) -> list[dict[str, Any]]:
        """All loads; a mode ends at the first level that brings no more."""
        loads: list[dict[str, Any]] = []
        left = TimeLeft(len(modes) * len(levels), 0)
        passed = 0
        for name, group in (
            ("smartgen", [mode for mode in modes if mode != STOCK]),
            (STOCK, [mode for mode in modes if mode == STOCK]),
        ):
            if not group:
                continue
            pair = self._pairs[name]
            self._say(f"starting {pair.name}")
            try:
                pair.start()
                prompt = list(range(1000, 1000 + pairs.WARM_UP_TOKENS))
                pairs.warm_up(pair, prompt, [cells.MODES[mode] for mode in group])
                for mode in group:
                    found: list[dict[str, Any]] = []
                    for level in levels:
                        self._say(f"{mode}, {level} at once, {left.text(passed)}")
                        found.append(self._load(pair, mode, level))
                        passed += 1
                        if saturated(found):
                            break
                    passed += len(levels) - len(found)
                    loads += found
            finally:
                pair.stop()
        return loads

    def _load(self, pair: pairs.Pair, mode: str, level: int) -> dict[str, Any]:
        pair.cluster.flush_cache("prefill")
        sessions = {role: pair.cluster.pids[role] for role in ("prefill", "decode")}
        for session in sessions.values():
            memory_use.reset_peak(session)
        count = level * self._args.requests
        prompts_file, out = self._work / "prompts.jsonl", self._work / f"{mode}-{level}.jsonl"
        serving_load.write_prompts(prompts_file, self._texts[:count])
        overrides = cells.MODES[mode]
        line = serving_load.command(
            url=pair.cluster.url,
            model=self._model,
            prompts=prompts_file,
            requests=count,
            concurrency=level,
            steps=self._args.steps,
            smartgen=None if overrides is None else {**overrides, "ratio": self._args.ratio},
            out=out,
        )
        row: dict[str, Any] = {"mode": mode, "concurrency": level, "requests": count}
        row |= dict.fromkeys(("output_tokens_per_s", "ttft_s", "tbt_s"))
        row["error"] = None
        try:
            row |= figures(serving_load.run(line, out, LOAD_TIMEOUT_S))
        except RequestError as error:
            row["error"] = str(error)
            self._say(f"  failed: {error}")
        row["peak_bytes"] = {role: memory_use.peak_bytes(sid) for role, sid in sessions.items()}
        if self._args.out is not None:
            with self._args.out.open("a") as file:
                file.write(json.dumps(row | self.about) + "\n")
        return row

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def figures(report: dict[str, Any]) -> dict[str, float | None]:
    """Output rate, median TTFT and median inter-token time of serving's report, in seconds."""
    gaps = [gap for request in report["itls"] for gap in request]
    return {
        "output_tokens_per_s": report["output_throughput"],
        "ttft_s": statistics.median(report["ttfts"]),
        "tbt_s": statistics.median(gaps) if gaps else None,
    }


def saturated(found: Sequence[dict[str, Any]]) -> bool:
    """Whether the last level failed or brought less than 5 % more output than the best before."""
    if found[-1]["error"] is not None:
        return True
    before = [load["output_tokens_per_s"] for load in found[:-1]]
    return bool(before) and found[-1]["output_tokens_per_s"] < GROWTH * max(before)


def summary(loads: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By mode: the most output, at how many requests at once, and the largest peaks."""
    result: dict[str, dict[str, Any]] = {}
    for mode in dict.fromkeys(load["mode"] for load in loads):
        own = [load for load in loads if load["mode"] == mode]
        best = max(own, key=lambda load: load["output_tokens_per_s"] or 0.0)
        result[mode] = {
            "output_tokens_per_s": best["output_tokens_per_s"] or 0.0,
            "concurrency": best["concurrency"],
            "peak_bytes": {
                role: max(load["peak_bytes"][role] for load in own) for role in own[0]["peak_bytes"]
            },
        }
    return result


def table(loads: Sequence[dict[str, Any]]) -> Table:
    """One row a load."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("mode", "at once", "output\ntokens/s", "TTFT\ns", "TBT\ns"):
        result.add_column(name, justify="left" if name == "mode" else "right")
    for name in ("P peak\nGB", "D peak\nGB"):
        result.add_column(name, justify="right")
    for load in loads:
        times = [
            "-" if load[key] is None else f"{load[key]:.{digits}f}"
            for key, digits in (("output_tokens_per_s", 1), ("ttft_s", 2), ("tbt_s", 3))
        ]
        peaks = [f"{load['peak_bytes'][role] / 1e9:.2f}" for role in ("prefill", "decode")]
        failed = " (failed)" if load["error"] else ""
        result.add_row(load["mode"] + failed, str(load["concurrency"]), *times, *peaks)
    return result
