"""`smartgen bench fill`: what speculative fill costs and brings, arm beside arm in one run.

One pair answers the same prompt in every arm, in rounds, so that a noisy machine is noisy for all
of them. `off` fetches on demand only, `fixed` grants a share of all blocks in every step (the
paper), `adaptive` what fits between fetches, `full` has everything before decode: the ideal of TBT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_smartgen.config import load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts, shaped
from sglang_smartgen.report.client import Answer, Client, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.demo import finished_record, kv_token_bytes
from sglang_smartgen.report.model_cache import ensure_model

ARMS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "off": {"speculative_ratio": 0.0},
    "fixed 5 %": {"credit": "fixed", "speculative_ratio": 0.05},
    "fixed 10 %": {"credit": "fixed", "speculative_ratio": 0.1},
    "fixed 20 %": {"credit": "fixed", "speculative_ratio": 0.2},
    "adaptive": {"credit": "adaptive"},
}
SAMPLE_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench fill`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--mbit", type=int, help="rate of the network (default: not shaped)")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=("of " + ", ".join(ARMS)).replace("%", "%%")
    )
    parser.add_argument("--config", default='{"ratio": 0.1}', help="of the pair: JSON or a file")
    parser.add_argument("--out", type=Path, help="append every request as a line of JSON here")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every request was answered."""
    shaped.enter(args.mbit)
    with result_stream(args.format):
        arms = _run(args, Console(stderr=True))
        Console().print(_table(args, arms))
    if args.format == "json":
        print(json.dumps({"mbit": args.mbit, "prompt_tokens": args.prompt_tokens, "arms": arms}))
    return 0


def _run(args: argparse.Namespace, log: Console) -> list[dict[str, Any]]:
    model = ensure_model()
    config = msgspec.to_builtins(load_config(args.config))
    tokenizer = prompts.load_tokenizer(model)
    prompt = prompts.text_prompt(tokenizer, prompts.demo_text(), args.prompt_tokens)
    names = [name.strip() for name in args.arms.split(",")]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    length = args.prompt_tokens + args.steps
    with tempfile.TemporaryDirectory(prefix="smartgen-fill-") as logs:
        cluster = Cluster(
            model, config=config, log_dir=Path(logs), max_total_tokens=max(8192, 3 * length)
        )
        with cluster:
            log.print("the pair is up; warming up")
            for arm in ({"mode": "full"}, {"speculative_ratio": 0.0}):
                Client(cluster.url).generate(prompt[:600], max_new_tokens=4, smartgen=arm)
            for number in range(args.rounds):
                for name in names:
                    row = _ask(cluster, prompt, args, ARMS[name])
                    row |= {"arm": name, "mbit": args.mbit, "round": number}
                    rows[name].append(row)
                    log.print(f"round {number + 1}, {name}: TTFT {row['ttft_s']:.2f} s")
                    if args.out is not None:
                        with args.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    token_bytes = kv_token_bytes(json.loads((model / "config.json").read_text()))
    return [_summary(name, rows[name], args.prompt_tokens * token_bytes) for name in names]


def _ask(
    cluster: Cluster, prompt: list[int], args: argparse.Namespace, arm: dict[str, Any]
) -> dict[str, Any]:
    cluster.flush_cache("prefill")
    rid = f"fill-{uuid.uuid4().hex[:10]}"
    with LinkMeter() as meter:
        answer: Answer = Client(cluster.url).generate(
            prompt, max_new_tokens=args.steps, ignore_eos=True, smartgen=arm, rid=rid
        )
    if answer.error is not None:
        raise RequestError(f"a request failed: {answer.error}")
    record = finished_record(cluster, rid)
    until = record["steps_until_local"]
    end = answer.token_times[min(until or 0, len(answer.token_times) - 1)] if until else None
    keys = ("bytes_proactive", "bytes_metadata", "bytes_on_demand", "bytes_speculative")
    return {
        "ttft_s": answer.ttft_s,
        "ttst_s": answer.ttst_s,
        "tbt_s": answer.inter_token_s,
        "steps_until_local": until,
        "link_busy": meter.busy(args.mbit, end),
        **{key: record[key] for key in keys},
    }


class LinkMeter:
    """Samples loopback's counter while a request runs, to say how busy the link was."""

    def __enter__(self) -> LinkMeter:
        self._began = time.monotonic()
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._samples.append((time.monotonic() - self._began, shaped.loopback_bytes()))

    def busy(self, mbit: int | None, end_s: float | None) -> float | None:
        """Share of the rate in use from the first push to `end_s`; None where it is not shaped."""
        if mbit is None or end_s is None:
            return None
        first = self._samples[0][1]
        # The first push is where the counter leaves the noise of the HTTP request behind.
        begun = [sample for sample in self._samples if sample[1] > first + 200_000]
        inside = [sample for sample in begun if sample[0] <= end_s]
        if len(inside) < 2:
            return None
        seconds = inside[-1][0] - inside[0][0]
        return (inside[-1][1] - inside[0][1]) * 8 / (mbit * 1e6 * max(seconds, SAMPLE_S))


def _summary(name: str, rows: list[dict[str, Any]], kv_bytes: int) -> dict[str, Any]:
    """Medians over the rounds; tbt_s is the median of each step."""
    steps = [statistics.median(step) for step in zip(*(row["tbt_s"] for row in rows), strict=True)]
    last = rows[-1]
    sent = last["bytes_proactive"] + last["bytes_on_demand"] + last["bytes_speculative"]
    until = [row["steps_until_local"] for row in rows if row["steps_until_local"] is not None]
    busy = [row["link_busy"] for row in rows if row["link_busy"] is not None]
    after = max(until) if until else len(steps)
    return {
        "arm": name,
        "ttft_s": statistics.median(row["ttft_s"] for row in rows),
        "ttst_s": statistics.median(row["ttst_s"] for row in rows),
        "tbt_s": steps,
        "tbt_first10_s": statistics.mean(steps[:10]),
        "tbt_after_s": statistics.mean(steps[after:]) if steps[after:] else None,
        "steps_until_local": max(until) if until else None,
        "link_busy": statistics.median(busy) if busy else None,
        "sent_twice": max(0.0, sent / kv_bytes - 1),
        "bytes": {key: last[key] for key in last if key.startswith("bytes_")},
    }


def _table(args: argparse.Namespace, arms: list[dict[str, Any]]) -> Table:
    rate = "not shaped" if args.mbit is None else f"{args.mbit} Mbit/s"
    table = Table(title=f"speculative fill, {args.prompt_tokens} prompt tokens, {rate}")
    columns = ("arm", "TTFT s", "TTST s", "TBT of 10 s", "TBT local s", "steps until local")
    for column in (*columns, "link busy", "MB on demand", "MB ahead"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in arms:
        until, busy, after = arm["steps_until_local"], arm["link_busy"], arm["tbt_after_s"]
        table.add_row(
            arm["arm"],
            f"{arm['ttft_s']:.2f}",
            f"{arm['ttst_s']:.2f}",
            f"{arm['tbt_first10_s']:.3f}",
            "-" if after is None else f"{after:.3f}",
            "-" if until is None else str(until),
            "-" if busy is None else f"{busy:.0%}",
            f"{arm['bytes']['bytes_on_demand'] / 1e6:.1f}",
            f"{arm['bytes']['bytes_speculative'] / 1e6:.1f}",
        )
    return table
