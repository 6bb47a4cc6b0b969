"""`smartgen bench cluster`: several prefill or decode servers behind one router, under load.

Half of the requests are asked with every server up; where there are several prefill servers one is
then killed (SIGKILL). The router sends again what it was serving, and what still fails is told with
its cause; every answer must be right, and all must be given back.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import requests
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts
from sglang_smartgen.report.cluster import Cluster, ClusterError
from sglang_smartgen.report.idle import LeakError, changes, wait_until_idle
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.trial import (
    ARM,
    SLOW_FILL,
    Asked,
    Question,
    Trial,
    mixed_lengths,
    questions,
    verdicts,
)

SEED = 5
REQUEST_S = 240.0
ROUTER_S = 120.0
# SGLang's full router: a request that meets a dead server is sent again, and nothing more goes
# there once its checks have failed. They ask for the model's name, since /health waits behind a
# long prefill. Its circuit breaker would take the decode server that reports a dead prefill for
# broken.
ROUTER = (
    *("--policy", "random", "--disable-circuit-breaker", "--worker-startup-check-interval", "1"),
    *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "2"),
    *("--health-success-threshold", "1", "--health-failure-threshold", "2"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench cluster`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--prefills", type=int, default=2, help="prefill servers (%(default)s)")
    parser.add_argument("--decodes", type=int, default=1, help="decode servers (%(default)s)")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="different ones (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (%(default)s)")
    parser.add_argument("--config", default='{"ratio": 0.1}', help="of all servers: JSON or a file")


def run(args: argparse.Namespace) -> int:
    """Run the trial; 0 when it passed. Raises ConfigError for flags that do not fit."""
    if min(args.prefills, args.decodes, args.concurrency, args.prompts) < 1 or args.requests < 2:
        raise ConfigError(
            f"--prefills is {args.prefills}, --decodes {args.decodes}, --concurrency "
            f"{args.concurrency}, --prompts {args.prompts}, --requests {args.requests}; "
            "all must be positive, with at least 2 requests"
        )
    with result_stream(args.format):
        result = _run(args, Console(stderr=True))
        _show(Console(), result)
    if args.format == "json":
        print(json.dumps(result))
    return 0 if not result["problems"] else 1


def _run(args: argparse.Namespace, log: Console) -> dict[str, Any]:
    model = ensure_model()
    tokenizer = prompts.load_tokenizer(model)
    config = msgspec.to_builtins(load_config(args.config))
    lengths = mixed_lengths(args.prompts, 300, 900, SEED)
    with tempfile.TemporaryDirectory(prefix="smartgen-cluster-") as logs:
        cluster = Cluster(
            model,
            config=config,
            log_dir=Path(logs),
            prefill_args=["--disable-radix-cache"],
            prefills=args.prefills,
            decodes=args.decodes,
            router_args=ROUTER,
        )
        with cluster:
            log.print(
                f"{len(cluster.pids) - 1} servers are up; the prompts are answered alone first"
            )
            _wait_for_router(cluster)
            asked = questions(cluster, tokenizer, lengths, args.tokens, (ARM, SLOW_FILL))
            return _trial(args, cluster, asked, log)


def _wait_for_router(cluster: Cluster) -> None:
    """Until the router has found every server. Raises ClusterError when it does not."""
    deadline = time.monotonic() + ROUTER_S
    while True:
        answer = requests.get(f"{cluster.url}/workers", timeout=30).json()
        found = [worker for worker in answer["workers"] if worker.get("is_healthy")]
        if len(found) == len(cluster.prefills) + len(cluster.decodes):
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"the router finds {len(found)} servers after {ROUTER_S:g} s")
        time.sleep(1.0)


def _trial(
    args: argparse.Namespace, cluster: Cluster, asked: list[Question], log: Console
) -> dict[str, Any]:
    before = wait_until_idle(cluster)
    half = args.requests // 2
    trial, killed = Trial(cluster), None
    met: list[Asked] = []
    with Progress(console=log, transient=True) as progress:
        task = progress.add_task("cluster", total=args.requests)

        def step(number: int) -> None:
            nonlocal killed, met
            if number == half and len(cluster.prefills) > 1:
                killed = cluster.prefills[-1]
                met = [one for one in trial.asked if one.answer is None]
                cluster.kill_prefill(killed)
            progress.update(task, completed=number)

        chance = random.Random(SEED)
        trial.load(asked, args.requests, args.concurrency, REQUEST_S, chance, step)
    early = [one for one in trial.asked[:half] if one not in met]
    late = [one for one in trial.asked if one not in early]
    problems = _problems(cluster, before, early, late, killed)
    return {
        "prefills": args.prefills,
        "decodes": args.decodes,
        "killed": killed,
        "before": verdicts(early),
        "after": verdicts(late),
        "causes": trial.causes()[:6],
        "rooms": {
            name: cluster.smartgen_state(name)["counters"]["rooms"] for name in cluster.decodes
        },
        "pushed_bytes": {
            name: cluster.smartgen_state(name)["bytes_proactive"]
            for name in cluster.prefills
            if name != killed
        },
        "problems": problems,
    }


def _problems(
    cluster: Cluster,
    before: dict[str, dict[str, int]],
    early: list[Asked],
    late: list[Asked],
    killed: str | None,
) -> list[str]:
    problems = []
    if set(verdicts(early)) - {"right", "near"}:
        problems.append("an answer was not right while every server was up")
    allowed = {"right", "near"} | ({"failed"} if killed else set())
    if set(verdicts(late)) - allowed:
        problems.append("a later answer was not right")
    if not verdicts(late).get("right"):
        problems.append("no later answer was right")
    try:
        after = wait_until_idle(cluster)
    except LeakError as error:
        return [*problems, str(error)]
    return problems + changes(before, after)


def _show(out: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"{result['prefills']} prefill and {result['decodes']} decode servers")
    for column in ("requests", "right", "near", "wrong", "failed"):
        table.add_column(column)
    killed = f"after {result['killed']} was killed" if result["killed"] else "second half"
    for name, key in (("first half", "before"), (killed, "after")):
        counts = result[key]
        table.add_row(name, *(str(counts.get(v, 0)) for v in ("right", "near", "wrong", "failed")))
    out.print(table)
    for key, noun in (("rooms", "rooms"), ("pushed_bytes", "bytes pushed")):
        counts = ", ".join(f"{name} {count}" for name, count in result[key].items())
        out.print(f"{noun}: {counts}")
    for cause in result["causes"]:
        out.print(f"failed: {cause}")
    out.print("; ".join(result["problems"]) or "passed")
