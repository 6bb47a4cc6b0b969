"""The two pairs of `smartgen bench network`, and one cell of it: a batch of requests, timed.

The caller's thread owns both pairs; a thread for each request of a batch sends it and reads its
tokens. One pair has SmartGen and serves all its modes, the other is stock SGLang.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import requests

from sglang_smartgen.report.client import Answer, Client, RequestError
from sglang_smartgen.report.cluster import Cluster, ClusterError
from sglang_smartgen.report.demo import finished_record
from sglang_smartgen.report.network_cells import STOCK, Cell
from sglang_smartgen.report.network_report import BYTE_KINDS

T = TypeVar("T")

SLOW_ENV = {
    "MC_TRANSFER_TIMEOUT": "1200",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1800",
}
"""Seconds that a slow network needs: Mooncake gives stock's one transfer 30, SGLang a request 300.

Mooncake cuts a transfer off at MC_TRANSFER_TIMEOUT, although all of it is still under way (94 MB at
20 Mbit/s: -1 after 30.1 s; with a longer timeout done after 39.8 s), and SGLang takes it for a
dead peer.
"""
SILENCE_S = 1800.0  # longest time without a token
WARM_UP_TOKENS, WARM_UP_STEPS = 600, 10
SETTLE_TOKENS = 768
RECORD_KEYS = (
    "prefill_s",
    "steps_until_local",
    "local_share_at_start",
    "entries_selected",
    "entries_fetched",
    "fetches",
    "fetch_wait_s",
)


class Pair:
    """A pair of servers that is started again when a request has broken it."""

    def __init__(self, name: str, make: Callable[[], Cluster], say: Callable[[str], None]) -> None:
        self.name = name
        self._make, self._say = make, say
        self._cluster: Cluster | None = None
        self._doubtful = False

    @property
    def cluster(self) -> Cluster:
        """The running servers."""
        assert self._cluster is not None
        return self._cluster

    @property
    def is_down(self) -> bool:
        """True when there are no servers: they did not start (again)."""
        return self._cluster is None

    def start(self, over: threading.Event | None = None) -> None:
        """Start the servers, until `over` is set. Raises ClusterError."""
        began = time.monotonic()
        cluster = self._make()

        def progress(seconds: float, ready: dict[str, bool]) -> None:
            if over is not None and over.is_set():
                raise ClusterError(f"the start of {self.name} was given up after {seconds:.0f} s")

        cluster.start(progress)
        if over is not None and over.is_set():
            cluster.stop()
            return
        self._cluster, self._doubtful = cluster, False
        self._say(f"{self.name} is up after {time.monotonic() - began:.0f} s")

    def stop(self) -> None:
        """End the servers; harmless when there are none."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    def doubt(self) -> None:
        """A request has failed: ask the servers before the next one."""
        self._doubtful = True

    def make_ready(self, prompt: list[int]) -> bool:
        """An idle pair with an empty prefix cache; True when it had to be started (again).

        prompt: for the question whether a doubtful pair still answers. Raises ClusterError.
        """
        if self._cluster is not None:
            try:
                if self._doubtful:
                    self._ask(prompt)
                self.cluster.flush_cache("prefill")
                self._doubtful = False
                return False
            except (ClusterError, RequestError, requests.RequestException) as error:
                cause = str(error).splitlines()[0]
                self._say(f"{self.name} has not recovered; starting it again ({cause})")
            self.stop()
        self.start()
        return True

    def _ask(self, prompt: list[int]) -> None:
        answer = Client(self.cluster.url, timeout_s=120.0).generate(
            prompt, max_new_tokens=2, ignore_eos=True
        )
        if answer.error is not None:
            raise RequestError(answer.error)


def run_alone(pair: Pair, pairs: Iterable[Pair]) -> None:
    """Let `pair` go on and stop the others, whose idle loops would take its cores."""
    for other in pairs:
        if other is not pair and not other.is_down:
            other.cluster.pause()
    if not pair.is_down:
        pair.cluster.resume()


def warm_up(pair: Pair, prompt: list[int], modes: Sequence[dict[str, Any] | None]) -> list[Answer]:
    """Unmeasured requests, one a mode. Raises RequestError when one fails."""
    found: list[Answer] = []
    for overrides in modes:
        pair.cluster.flush_cache("prefill")
        answer = Client(pair.cluster.url).generate(
            prompt[:WARM_UP_TOKENS],
            max_new_tokens=WARM_UP_STEPS,
            ignore_eos=True,
            smartgen=overrides,
        )
        if answer.error is not None:
            raise RequestError(f"the warm-up of {pair.name} failed: {answer.error}")
        found.append(answer)
    return found


def settle(pair: Pair, prompt: list[int]) -> None:
    """Let P measure the rate: a full transfer of which nothing is kept."""
    Client(pair.cluster.url, timeout_s=SILENCE_S).generate(
        prompt[:SETTLE_TOKENS], max_new_tokens=2, ignore_eos=True, smartgen={"mode": "full"}
    )
    pair.cluster.flush_cache("prefill")


def measure(
    pair: Pair, cell: Cell, prompts: Sequence[list[int]], token_bytes: int
) -> list[dict[str, Any]]:
    """Send the cell's requests at once; one row each. A failure is a row with its cause."""
    bandwidth = None
    if cell.mode != STOCK:
        bandwidth = pair.cluster.smartgen_state("prefill")["bandwidth"]
    overrides = cell.overrides()
    smartgen = None if overrides is None else overrides | {"trace": True}
    run = uuid.uuid4().hex[:10]

    def ask(number: int) -> tuple[Answer, float]:
        began = time.monotonic()
        answer = Client(pair.cluster.url, timeout_s=SILENCE_S).generate(
            prompts[number],
            max_new_tokens=cell.steps,
            ignore_eos=True,
            smartgen=smartgen,
            rid=f"network-{run}-{number}",
        )
        return answer, began

    answers = together([lambda number=number: ask(number) for number in range(cell.batch)])
    pushed: dict[int, dict[str, Any]] = {}
    if smartgen is not None:
        finished = pair.cluster.smartgen_state("prefill").get("finished", [])
        pushed = {push["room"]: push for push in finished}
    rows: list[dict[str, Any]] = []
    for number, (answer, began) in enumerate(answers):
        row = request_row(cell, number, answer, bandwidth)
        if row["error"] is None and smartgen is None:
            # Stock SGLang counts no bytes; it sends the whole KV once, before decode starts.
            row["bytes"] = dict.fromkeys(BYTE_KINDS, 0)
            row["bytes"]["proactive"] = cell.prompt_tokens * token_bytes
            row["bytes_computed"] = True
        elif row["error"] is None:
            try:
                record = finished_record(pair.cluster, str(answer.rid))
                add_record(row, record, pushed.get(record["room"]), began)
            except RequestError as error:
                row["error"] = str(error)
        rows.append(row)
    if any(row["error"] is not None for row in rows):
        pair.doubt()
    return rows


def request_row(cell: Cell, number: int, answer: Answer, bandwidth: float | None) -> dict[str, Any]:
    """The line of one request, as far as the client knows it.

    tbt_s: time between each token and the one before. bandwidth: bytes/s, what P knew of the
    network when the request came.
    """
    error = answer.error
    if error is None and answer.cached_tokens:
        error = f"prefill reused {answer.cached_tokens} cached tokens, although it was flushed"
    if error is None and len(answer.token_times) != cell.steps:
        error = f"{len(answer.token_times)} tokens came, {cell.steps} were asked for"
    return {
        **{field: getattr(cell, field) for field in Cell.__struct_fields__},
        "request": number,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": error,
        "ttft_s": answer.ttft_s,
        "ttst_s": answer.ttst_s,
        "token_times_s": [round(at, 5) for at in answer.token_times],
        "tbt_s": [round(gap, 5) for gap in answer.inter_token_s],
        "token_ids": answer.token_ids,
        "bandwidth": bandwidth,
        "bytes": {},
    }


def failed_rows(cell: Cell, cause: str) -> list[dict[str, Any]]:
    """The lines of a cell that could not be asked for."""
    answer = Answer(error=cause)
    return [request_row(cell, number, answer, None) for number in range(cell.batch)]


def outcome(rows: Sequence[dict[str, Any]]) -> str:
    """What came of a cell, in a few words."""
    for row in rows:
        if row["error"] is not None:
            return f"failed: {row['error'][:200]}"
    first = max(row["ttft_s"] for row in rows)
    gaps = [gap for row in rows for gap in row["tbt_s"]]
    return f"TTFT {first:.2f} s, TBT {sum(gaps) / len(gaps):.3f} s"


def add_record(
    row: dict[str, Any], record: dict[str, Any], push: dict[str, Any] | None, began: float
) -> None:
    """Put D's record of a request and P's of its pushes into its row.

    timeline: seconds since the request was sent, `began` on this machine's monotonic clock, which
    the servers share: `opened` and `started` on D, `prefill` on P, `writes` [start, end, bytes,
    spans] of P's pushes, `steps` [start, seconds waited, bytes fetched, bytes filled] of D.
    """
    if record["failure"] or record["fallback"]:
        row["error"] = f"not SmartGen's: {record['failure'] or record['fallback']}"
    row["bytes"] = {kind: record[f"bytes_{kind}"] for kind in BYTE_KINDS}
    row |= {key: record[key] for key in RECORD_KEYS}

    def since(at: float) -> float:
        return round(at - began, 5)

    line: dict[str, Any] = {
        "opened": since(record["opened_at"]),
        "started": since(record["started_at"]),
        "steps": [
            [since(at), round(wait, 5), got, filled] for at, wait, got, filled in record["trace"]
        ],
    }
    if push is not None:
        writes = [
            [since(start), since(end), size, spans] for start, end, size, spans in push["writes"]
        ]
        row["descriptors"] = sum(spans for *_, spans in writes)
        line["writes"] = writes
        if push["began_at"] is not None:
            start = since(push["began_at"])
            line["prefill"] = [start, round(start + push["prefill_s"], 5)]
    row["timeline"] = line


def pairs_of(
    model: Path,
    config: dict[str, Any],
    log_dir: Path,
    max_total_tokens: int,
    say: Callable[[str], None],
    args: Sequence[str] = (),
    decode_host: str | None = None,
) -> dict[str, Pair]:
    """The SmartGen pair and the stock pair by name, not started; `args` are SGLang's flags."""

    def maker(name: str, settings: dict[str, Any] | None) -> Callable[[], Cluster]:
        return lambda: Cluster(
            model,
            config=settings,
            log_dir=log_dir / name,
            max_total_tokens=max_total_tokens,
            env=SLOW_ENV,
            prefill_args=args,
            decode_args=args,
            decode_host=decode_host,
        )

    return {
        "smartgen": Pair("the SmartGen pair", maker("smartgen", config), say),
        STOCK: Pair("the stock pair", maker(STOCK, None), say),
    }


def start_all(pairs: Sequence[Pair]) -> None:
    """Start pairs side by side. Raises ClusterError, and then none is left running."""
    over = threading.Event()
    try:
        together([lambda pair=pair: pair.start(over) for pair in pairs])
    except BaseException:
        over.set()
        for pair in pairs:
            pair.stop()
        raise


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return, each in a thread of its own; the first error there is raised here.

    The threads do not keep an interrupted command alive.
    """
    if len(calls) == 1:
        return [calls[0]()]
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int, call: Callable[[], T]) -> None:
        try:
            found[number] = call()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(calls))]
