"""`smartgen bench serve`: fetches against a prefill node that prefills, thread beside process.

Two prefill nodes, one with its store served by a thread and one by a process, take turns: each
prefills a real model for a while without fetches (`off`), with all fetches going to the other node,
which rests (`elsewhere`: the machine is as busy, this interpreter is not), and with all fetches
going to itself (`on`). Prefill has a core for itself where there are two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_smartgen.output import result_stream

MODES = ("thread", "process")
WINDOWS = ("off", "elsewhere", "on")
WANTED = {"prefill_share": 0.97, "fetch_p99_ms": 5.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench serve`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--rate", type=float, default=500.0, help="fetches a second (%(default)s)")
    parser.add_argument("--kib", type=int, default=16, help="size of a fetch (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of all windows (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of 2 s: figures are rough")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every fetch was answered, whatever the figures say.

    Raises ConfigError or ModelCacheError with one sentence.
    """
    if args.quick:
        args.rounds, args.seconds = 1, 2.0
    with result_stream(args.format) as out:
        result = _measure(args)
        if args.format == "json":
            print(json.dumps(result), file=out)
        else:
            _print(result)
    return 1 if any(arm["failed"] for arm in result["arms"].values()) else 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from sglang_smartgen.report import serve_load
    from sglang_smartgen.report.machine import machine_facts

    machine = machine_facts()  # before this process leaves a core
    speed: dict[str, dict[str, list[float]]] = {m: {w: [] for w in WINDOWS} for m in MODES}
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    failed = dict.fromkeys(MODES, 0)
    with contextlib.ExitStack() as stack:
        hosts = {mode: serve_load.Host(mode) for mode in MODES}
        for host in hosts.values():
            stack.callback(host.close)
        serve_load.leave_first_core()
        load = serve_load.Load(args.kib << 10, args.rate)
        stack.callback(load.close)
        ends = {mode: load.meet(host) for mode, host in hosts.items()}
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("serve", total=args.rounds * len(MODES) * len(WINDOWS))
        for number in range(args.rounds):
            for mode in MODES:
                # The other way round every second time: a machine that warms up is no arm's.
                for window in WINDOWS if number % 2 == 0 else reversed(WINDOWS):
                    end = _served(ends, mode, window)
                    answer, times, lost = _window(hosts[mode], load, end, args.seconds)
                    speed[mode][window].append(answer["tokens"] / answer["seconds"])
                    if window == "on":
                        took[mode] += times
                        failed[mode] += lost
                    progress.advance(task)
    arms = {mode: _arm(speed[mode], took[mode], failed[mode]) for mode in MODES}
    sizes = {"fetch_bytes": args.kib << 10, "fetches_per_s": args.rate}
    return {"arms": arms, "wanted": WANTED, **sizes, "machine": machine}


def _served(ends: dict[str, Any], mode: str, window: str) -> Any:
    """Where a window's fetches go: nowhere, to the other node, or to the one that prefills."""
    if window == "off":
        return None
    return ends[mode] if window == "on" else next(ends[m] for m in MODES if m != mode)


def _window(
    host: Any, load: Any, end: Any, seconds: float
) -> tuple[dict[str, float], list[float], int]:
    """One window: what the host prefilled, seconds of each fetch, and fetches that failed."""
    over = threading.Event()
    asked: list[tuple[list[float], int]] = []
    asker = threading.Thread(target=lambda: asked.append(load.ask_until(end, over)))
    if end is not None:
        asker.start()
    try:
        answer = host.command({"run": seconds})
    finally:
        over.set()
    if end is None:
        return answer, [], 0
    asker.join()
    return answer, *asked[0]


def _arm(speed: dict[str, list[float]], took: list[float], failed: int) -> dict[str, Any]:
    """The figures of one arm; shares are medians over the rounds, each within its round."""

    def share(window: str, of: str) -> float:
        pairs = zip(speed[window], speed[of], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 4)

    ordered = sorted(took)
    return {
        "prefill_tokens_per_s": {w: round(statistics.median(speed[w]), 1) for w in WINDOWS},
        "prefill_share": share("on", "off"),
        "prefill_share_of_elsewhere": share("on", "elsewhere"),
        "fetches": len(took),
        "failed": failed,
        "fetch_p50_ms": quantile_ms(ordered, 0.5),
        "fetch_p99_ms": quantile_ms(ordered, 0.99),
        "fetch_max_ms": quantile_ms(ordered, 1.0),
    }


def quantile_ms(ordered: list[float], share: float) -> float:
    """The value below which `share` of the ascending seconds lie, in ms; 0 of none."""
    if not ordered:
        return 0.0
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['fetches_per_s']:.0f} fetches/s of {result['fetch_bytes']} bytes")
    names = ("prefill off", "elsewhere", "on (tokens/s)", "on / off", "on / elsewhere")
    for name in ("server", *names, "fetch p50", "p99", "max (ms)", "failed"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for mode, arm in result["arms"].items():
        speeds = [f"{arm['prefill_tokens_per_s'][window]:.0f}" for window in WINDOWS]
        shares = [f"{arm[key]:.1%}" for key in ("prefill_share", "prefill_share_of_elsewhere")]
        times = [f"{arm[f'fetch_{key}_ms']:.2f}" for key in ("p50", "p99", "max")]
        table.add_row(mode, *speeds, *shares, *times, str(arm["failed"]))
    Console().print(table)
