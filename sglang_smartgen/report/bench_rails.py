"""`smartgen bench rails`: two shaped rails that are equal, unequal, slowed and cut, and what waits.

Everything between two processes in network namespaces of this machine (see rails_net.py); no
servers. The last measurements need no shaping: what deciding costs, what one rail costs against the
transport alone, and shm beside Mooncake on one host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_smartgen.output import result_stream
from sglang_smartgen.report import rails_runs as runs
from sglang_smartgen.report.machine import machine_facts
from sglang_smartgen.report.rails_net import MTU, RailsNet
from sglang_smartgen.report.rails_plot import draw
from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.transport import Priority

FAST, SLOW = 100.0, 10.0  # Mbit/s
PAYLOAD = (MTU - 52) / (MTU + 14)  # of the wire's bytes: IP, TCP with time stamps, Ethernet
WARM_S = 3.0
REPEATS = 3  # of a rate; the median of them counts, all are reported
ROUNDS = 4  # of idle and loaded fetches in turn, so that whatever else runs here meets both
TURNS = 200  # of one rail and the transport alone, each time in the other order
EVENT_S, BACK_S = 2.0, 5.0  # when a rail is slowed or cut, and when it returns
SWITCH_INTERVAL_S = 0.0005  # as in the scheduler process: Python's default is a whole fetch
TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench rails`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument(
        "--rail", choices=("mooncake", "socket"), default="mooncake", help="(%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of one rate (%(default)s)")
    parser.add_argument("--fetches", type=int, default=400, help="of one p99 (%(default)s)")
    parser.add_argument("--only", help="a list of: rates, slowed, cut, fetch, host")
    parser.add_argument("--out", type=Path, help="a picture: bytes a rail through a failure")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when no write failed and all bytes were right.

    Raises ConfigError where the machine cannot make the network.
    """
    for name in TIMEOUTS:
        os.environ.setdefault(name, "2")
    os.environ.setdefault("MC_FORCE_TCP", "1")
    os.environ.setdefault("GLOG_minloglevel", "2")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with result_stream(args.format) as out:
        report = Bench(args).run()
        if args.format == "json":
            print(json.dumps(report), file=out, flush=True)
        else:
            show(report, Console(file=out))
    return 1 if report["failures"] or not report["right"] else 0


class Bench:
    """One run: the parts in turn, and the report they fill."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._kind = args.rail
        self._seconds = args.seconds
        self._fetches = args.fetches
        self._out = args.out
        self._only = set(args.only.split(",")) if args.only else None
        self.report: dict[str, Any] = {
            "rail": args.rail,
            "machine": machine_facts(),
            "shaping": f"tbf on veth, MTU {MTU}; payload at most {PAYLOAD:.3f} of it",
            "failures": [],
            "right": True,
        }

    def run(self) -> dict[str, Any]:
        """All parts. The fields that are promised come last."""
        if self._wanted("host"):
            self._host()
        parts = ("rates", "slowed", "cut", "fetch")
        if any(map(self._wanted, parts)):
            with RailsNet() as net:
                for part in parts:
                    if self._wanted(part):
                        _say(f"{part}: {self._kind} over two rails")
                        with self._ends(net) as end:
                            getattr(self, f"_{part}")(net, end)
                            self.report["right"] &= end.right()
                            self.report["failures"] += end.failures
        names = ("two_equal_mbit", "degraded_mbit", "striped_mbit", "cut_dip_ms", "fetch_p99_ratio")
        for name in names:
            if name in self.report:
                self.report[name] = self.report.pop(name)
        return self.report

    def _wanted(self, part: str) -> bool:
        return self._only is None or part in self._only

    @contextlib.contextmanager
    def _ends(self, net: RailsNet) -> Iterator[runs.Ends]:
        here = [f"{self._kind}@{net.host(rail, False)}" for rail in range(net.count)]
        there = [f"{self._kind}@{net.host(rail, True)}" for rail in range(net.count)]
        for rail in range(net.count):
            net.set_link(rail, up=True)
            net.set_rate(rail, FAST)
        with runs.ends(self._kind, net, here, there) as end:
            end.stream(WARM_S)
            yield end

    def _rates(self, net: RailsNet, end: runs.Ends) -> None:
        self._rate("two_equal_mbit", end)
        net.set_rate(1, SLOW)
        end.stream(WARM_S)
        self._rate("degraded_mbit", end)
        self.report["striped_mbit"] = round(runs.striped_mbit(end, 8 << 20), 1)

    def _rate(self, name: str, end: runs.Ends) -> None:
        rates = []
        for _ in range(REPEATS):
            samples = end.stream(self._seconds)
            rates.append(round(runs.rate_mbit(samples, 0.0, self._seconds), 1))
        self.report[f"{name}_runs"] = rates
        self.report[name] = statistics.median(rates)

    def _slowed(self, net: RailsNet, end: runs.Ends) -> None:
        events = [(EVENT_S, lambda: net.set_rate(1, SLOW))]
        samples = end.stream(EVENT_S + 4.0, events)
        carried = runs.rate_mbit(samples, EVENT_S + 1.0, EVENT_S + 4.0)
        can = (FAST + SLOW) * PAYLOAD
        self.report["slowed_share_after_1_s"] = round(carried / can, 3)
        self.report["slowed_mbit"] = round(carried, 1)

    def _cut(self, net: RailsNet, end: runs.Ends) -> None:
        events = [
            (EVENT_S, lambda: net.set_link(1, up=False)),
            (BACK_S, lambda: net.set_link(1, up=True)),
        ]
        samples = end.stream(BACK_S + 7.0, events)
        zero = samples[0].at
        paused = [s for s in samples if s.paused[1] and s.at >= zero + EVENT_S]
        if not paused:
            raise RuntimeError("the cut rail was never given up")
        detected = paused[0].at
        self.report["cut_detected_ms"] = round((detected - zero - EVENT_S) * 1e3)
        self.report["cut_dip_ms"] = round(runs.dip_ms(samples, detected, 0.9 * FAST * PAYLOAD), 1)
        at_return = next(s for s in samples if s.at >= zero + BACK_S)
        again = [
            s.at - at_return.at
            for s in samples
            if s.at > at_return.at and s.bytes[1] > at_return.bytes[1]
        ]
        self.report["cut_back_s"] = round(again[0], 2) if again else None
        self.report["cut_failed_writes"] = len(end.failures)
        self.report["retries"] = [link.retries for link in end.links]
        draw(samples, [(EVENT_S, "cut"), (BACK_S, "returns")], self._picture())

    def _fetch(self, net: RailsNet, end: runs.Ends) -> None:
        idle_ms: list[float] = []
        loaded_ms: list[float] = []
        plain_ms: list[float] = []
        count = -(-self._fetches // ROUNDS)
        for _ in range(ROUNDS):
            idle_ms += runs.fetch_ms(end, count, Priority.ON_DEMAND, None)
            loaded_ms += runs.fetch_ms(end, count, Priority.ON_DEMAND, Priority.SPECULATIVE)
            plain_ms += runs.fetch_ms(end, count // 4, Priority.PROACTIVE, Priority.PROACTIVE)
        idle, loaded, plain = _p99(idle_ms), _p99(loaded_ms), _p99(plain_ms)
        slice_ms = max(_slice_ms(link) for link in end.links)
        self.report["fetch_idle_p99_ms"] = round(idle, 2)
        self.report["fetch_p99_ms"] = round(loaded, 2)
        self.report["fetch_p99_ms_without_priorities"] = round(plain, 2)
        self.report["slice_ms"] = round(slice_ms, 2)
        self.report["fetch_p99_ratio"] = round(max(0.0, loaded - slice_ms) / idle, 2)

    def _host(self) -> None:
        """One host: the cost of deciding, of being rails at all, and shm beside Mooncake."""
        size, count, writes = 1 << 20, 4, 10
        with runs.ends("mooncake", None, ["mooncake"], ["mooncake"]) as end:
            link_of = end.transport.rails[0].transport
            theirs = ["direct", "mooncake"]
            with runs.receiver(None, None, theirs) as (peer, at):
                source = end.source.ctypes.data
                arms = [(link_of, peer, at), (end.transport, end.peer, end.at)]
                both: list[list[float]] = [[], []]
                for turn in range(TURNS + 2):  # the first two warm up
                    for arm in (0, 1) if turn % 2 else (1, 0):
                        to, whom, where = arms[arm]
                        times = runs.blocks_s(to, whom, source, where, size, count, writes)
                        if turn >= 2:
                            both[arm].append(sum(times))
        # Of one turn both arms meet the same machine, so the median of the shares of turns.
        shares = [alone / over for alone, over in zip(*both, strict=True)]
        self.report["one_rail_share"] = round(statistics.median(shares), 3)
        self.report["one_rail_share_quartiles"] = [
            round(share, 3) for share in statistics.quantiles(shares, n=4)[::2]
        ]
        alone = statistics.median(both[0]) / writes
        with runs.ends("shm", None, ["mooncake", "shm"], ["mooncake", "shm"]) as end:
            source = end.source.ctypes.data
            times = runs.blocks_s(end.transport, end.peer, source, end.at, size, count, 60)
            chosen = {link.name.split("@")[0] for link in end.links if link.slices}
            self.report["same_host_chose"] = sorted(chosen)
        near = statistics.median(times[15:])
        self.report["mooncake_gb_s"] = round(count * size / alone / 1e9, 2)
        self.report["shm_gb_s"] = round(count * size / near / 1e9, 2)
        self.report["shm_over_mooncake"] = round(alone / near, 2)
        self.report["deciding_us"] = round(deciding_us(), 2)

    def _picture(self) -> Path:
        return self._out or Path(tempfile.gettempdir()) / "smartgen-rails.png"


def deciding_us(slices: int = 1000) -> float:
    """Microseconds of choosing a link of four for a slice and accounting for it.

    The least of ten medians: what else runs on this core meanwhile is not what deciding costs.
    """
    found = []
    for _ in range(10):
        found.append(_deciding_us(slices))
        time.sleep(0.05)
    return min(found)


def _deciding_us(slices: int) -> float:
    from sglang_smartgen.transfer.rails.decide import pick, usable
    from sglang_smartgen.transfer.rails.intent import Intent
    from sglang_smartgen.transfer.transport import Span

    links = [Link(f"link{i}", _Nothing(), "peer") for i in range(4)]  # type: ignore[arg-type]
    intent = Intent([Span(0, 0, slices << 16)], Priority.PROACTIVE)
    times = []
    for _ in range(slices - 1):
        began = time.perf_counter()
        link = pick(usable(links), intent.priority, intent.uncut, None, began)
        if link is None:
            link = links[0]
        slice_ = intent.cut(1 << 16)
        attempt = link.begin(slice_, began)
        times.append(time.perf_counter() - began)
        link.end(attempt, None, began + 1e-3)
    return statistics.median(times) * 1e6


class _Nothing:
    name = session = "nothing"


def _slice_ms(link: Link) -> float:
    return link.slice_bytes(Priority.SPECULATIVE) / link.speed.bandwidth * 1e3


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table("measurement", "value")
    for name, value in report.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else str(value))
    console.print(table)
