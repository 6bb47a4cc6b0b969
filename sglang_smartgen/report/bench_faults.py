"""`smartgen bench faults`: one pair, one trouble after the other, and what became of the requests.

`aborts`: requests aborted at random moments. `freeze`: D stopped for ten seconds in mid-push
(SIGSTOP). `restart`: P killed and started again at its ports. `cut`: the network carries nothing
for four seconds (needs root: the servers run in a network namespace of their own). A request that
meets a trouble may fail, with room, rank and cause, or be right; the ones after it must be right,
everything must be given back, and the node that was not touched must stay healthy.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts, shaped
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.idle import LeakError, changes, wait_until_idle
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.trial import ARM, SLOW_FILL, Question, Trial, mixed_lengths, questions

FREEZE_S, CUT_S = 10.0, 4.0
LOAD = 4  # requests that meet a trouble
END_S = 180.0  # for every request to end after a trouble
SEED = 11
LENGTHS = mixed_lengths(8, 300, 900, SEED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench faults`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--faults", default=",".join(FAULTS), help="of " + ", ".join(FAULTS))
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (%(default)s)")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the network (%(default)s)")
    parser.add_argument("--config", default='{"ratio": 0.1}', help="of the pair: JSON or a file")


def run(args: argparse.Namespace) -> int:
    """Run the trials; 0 when every one passed. Raises ConfigError for flags that do not fit."""
    names = args.faults.split(",")
    if unknown := set(names) - set(FAULTS):
        raise ConfigError(f"--faults has {', '.join(unknown)}; allowed are {', '.join(FAULTS)}")
    if "cut" in names:
        shaped.enter(args.mbit)
    with result_stream(args.format):
        results = _run(args, names, Console(stderr=True))
        _show(Console(), results)
    if args.format == "json":
        print(json.dumps({"faults": results}))
    return 0 if all(result["passed"] for result in results.values()) else 1


def _run(args: argparse.Namespace, names: list[str], log: Console) -> dict[str, dict[str, Any]]:
    model = ensure_model()
    tokenizer = prompts.load_tokenizer(model)
    config = msgspec.to_builtins(load_config(args.config))
    with tempfile.TemporaryDirectory(prefix="smartgen-faults-") as logs:
        cluster = Cluster(
            model, config=config, log_dir=Path(logs), prefill_args=["--disable-radix-cache"]
        )
        with cluster:
            log.print("the pair is up; the prompts are answered alone first")
            asked = questions(cluster, tokenizer, LENGTHS, args.tokens, (ARM, SLOW_FILL))
            results = {}
            for name in names:
                log.print(f"{name} ...")
                results[name] = _try(args, cluster, asked, FAULTS[name])
                log.print(f"{name}: {json.dumps(results[name])}")
    return results


def _try(
    args: argparse.Namespace,
    cluster: Cluster,
    asked: list[Question],
    fault: Callable[[argparse.Namespace, Trial, list[Question]], list[str]],
) -> dict[str, Any]:
    """One trouble: requests that meet it, then others; what is wrong with either."""
    before, wrong_before = wait_until_idle(cluster), _wrong_stretches(cluster)
    meets, after = Trial(cluster), Trial(cluster)
    problems: list[str] = []
    began = time.monotonic()
    try:
        healthy = fault(args, meets, asked)
        meets.wait(END_S)
        seconds = time.monotonic() - began
        problems += [f"/health of {role} is not 200" for role in healthy if not _ok(cluster, role)]
        for question in asked[:LOAD]:
            after.ask(question)
        after.wait(END_S)
        held = wait_until_idle(cluster)
        # A restarted P begins with an empty store; only what both have is compared.
        problems += changes(before, held)
    except LeakError as error:
        problems.append(str(error))
    if wrong := _wrong_stretches(cluster) - wrong_before:
        problems.append(f"{wrong} stretches of KV were not what P computed")
    if meets.verdicts().get("wrong"):
        problems.append("a request that met the trouble was answered wrong")
    if set(after.verdicts()) - {"right", "near"}:
        problems.append("a request after the trouble was not answered right")
    return {
        "passed": not problems,
        "problems": problems,
        "during": meets.verdicts(),
        "after": after.verdicts(),
        "causes": meets.causes()[:6],
        "seconds": round(seconds, 1),
    }


def _wrong_stretches(cluster: Cluster) -> int:
    return int(cluster.smartgen_state("decode")["counters"]["stretches_wrong"])


def _ok(cluster: Cluster, role: str) -> bool:
    import requests

    status = requests.get(f"{cluster.urls[role]}/health", timeout=60).status_code
    return bool(status == 200)


def _load(trial: Trial, asked: list[Question]) -> None:
    """Requests in every state: some decode already, one prefills, one waits."""
    for question in asked[:LOAD]:
        trial.ask(question)
    time.sleep(6.0)
    for question in asked[LOAD : 2 * LOAD]:
        trial.ask(question)
    time.sleep(3.0)


def _aborts(args: argparse.Namespace, trial: Trial, asked: list[Question]) -> list[str]:
    import requests

    def abort(rid: str) -> None:
        for role in ("prefill", "decode"):
            url = f"{trial.cluster.urls[role]}/abort_request"
            requests.post(url, json={"rid": rid}, timeout=30)

    chance = random.Random(SEED)
    places = threading.Semaphore(6)
    for _ in range(args.aborts):
        places.acquire(timeout=END_S)
        request = trial.ask(chance.choice(asked), on_end=lambda _: places.release())
        timer = threading.Timer(chance.uniform(0.0, 12.0), abort, (request.rid,))
        timer.daemon = True
        timer.start()
    return ["prefill", "decode"]


def _freeze(args: argparse.Namespace, trial: Trial, asked: list[Question]) -> list[str]:
    _load(trial, asked)
    trial.cluster.signal(signal.SIGSTOP, "decode")
    try:
        time.sleep(FREEZE_S / 2)
        healthy = _ok(trial.cluster, "prefill")
        time.sleep(FREEZE_S / 2)
    finally:
        trial.cluster.signal(signal.SIGCONT, "decode")
    if not healthy:
        raise LeakError("/health of prefill was not 200 while decode was stopped")
    return ["prefill", "decode"]


def _restart(args: argparse.Namespace, trial: Trial, asked: list[Question]) -> list[str]:
    _load(trial, asked)
    trial.cluster.kill_prefill()
    trial.wait(END_S)
    if not _ok(trial.cluster, "decode"):
        raise LeakError("/health of decode was not 200 while prefill was gone")
    trial.cluster.restart_prefill()
    return ["prefill", "decode"]


def _cut(args: argparse.Namespace, trial: Trial, asked: list[Question]) -> list[str]:
    _load(trial, asked)
    shaped.set_link(up=False)
    try:
        time.sleep(CUT_S)
    finally:
        shaped.set_link(up=True)
    return ["prefill", "decode"]


FAULTS = {"aborts": _aborts, "freeze": _freeze, "restart": _restart, "cut": _cut}


def _show(out: Console, results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="requests that met a trouble, and those after it")
    for column in ("trouble", "during", "after", "verdict"):
        table.add_column(column)
    for name, result in results.items():
        during, after = (
            ", ".join(f"{count} {verdict}" for verdict, count in result[key].items())
            for key in ("during", "after")
        )
        table.add_row(name, during, after, "; ".join(result["problems"]) or "passed")
    out.print(table)
