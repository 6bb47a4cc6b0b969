"""`smartgen bench soak`: many requests of mixed length at once; all answers right, memory flat?

Every prompt is answered alone first. Then they are asked again and again, several at a time; P
keeps no prefix cache, so each is prefilled anew. D compares the KV with P's checksums. Memory is
that of every server process after a third of the requests and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.idle import wait_until_idle
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.processes import session_members
from sglang_smartgen.report.trial import ARM, SLOW_FILL, Question, Trial, mixed_lengths, questions

SEED = 7
REQUEST_S = 240.0
LARGE = 20 << 20  # bytes below which a process is not worth a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench soak`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24, help="different ones (%(default)s)")
    parser.add_argument("--shortest", type=int, default=260, help="prompt tokens (%(default)s)")
    parser.add_argument("--longest", type=int, default=900, help="prompt tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (%(default)s)")
    parser.add_argument("--config", default='{"ratio": 0.1}', help="of the pair: JSON or a file")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every answer was right and every byte what P computed."""
    if not 0 < args.shortest <= args.longest or args.requests < 3 or args.concurrency < 1:
        raise ConfigError(
            f"--shortest is {args.shortest}, --longest {args.longest}, --requests {args.requests}, "
            f"--concurrency {args.concurrency}; all must be positive, with shortest <= longest "
            "and at least 3 requests"
        )
    with result_stream(args.format):
        result = _run(args, Console(stderr=True))
        _show(Console(), result)
    if args.format == "json":
        print(json.dumps(result))
    wrong = result["verdicts"].keys() - {"right", "near"}
    return 1 if wrong or result["stretches_wrong"] else 0


def _run(args: argparse.Namespace, log: Console) -> dict[str, Any]:
    model = ensure_model()
    tokenizer = prompts.load_tokenizer(model)
    config = msgspec.to_builtins(load_config(args.config))
    lengths = mixed_lengths(args.prompts, args.shortest, args.longest, SEED)
    with tempfile.TemporaryDirectory(prefix="smartgen-soak-") as logs:
        cluster = Cluster(
            model, config=config, log_dir=Path(logs), prefill_args=["--disable-radix-cache"]
        )
        with cluster:
            log.print(f"the pair is up; {args.prompts} prompts are answered alone first")
            asked = questions(cluster, tokenizer, lengths, args.tokens, (ARM, SLOW_FILL))
            before = wait_until_idle(cluster)
            trial, memory = _ask_all(args, cluster, asked, log)
            after = wait_until_idle(cluster)
            counters = cluster.smartgen_state("decode")["counters"]
    return {
        "requests": len(trial.asked),
        "concurrency": args.concurrency,
        "verdicts": trial.verdicts(),
        "causes": trial.causes(),
        "stretches_checked": counters["stretches_checked"],
        "stretches_wrong": counters["stretches_wrong"],
        "idle_before": before,
        "idle_after": after,
        "rss_bytes": memory,
    }


def _ask_all(
    args: argparse.Namespace, cluster: Cluster, asked: list[Question], log: Console
) -> tuple[Trial, dict[str, list[int]]]:
    """Keep `concurrency` requests open until all are done; memory by process at a third and end."""
    trial = Trial(cluster)
    memory: dict[str, list[int]] = {}
    with Progress(console=log, transient=True) as progress:
        task = progress.add_task("soak", total=args.requests)

        def before(number: int) -> None:
            if number == args.requests // 3:
                _add(memory, cluster)
            progress.update(task, completed=number)

        chance = random.Random(SEED + 1)
        trial.load(asked, args.requests, args.concurrency, REQUEST_S, chance, before)
    _add(memory, cluster)
    return trial, memory


def _add(memory: dict[str, list[int]], cluster: Cluster) -> None:
    """Append the resident bytes of every process of the pair, by role, title and rank."""
    import psutil

    for role, session in cluster.pids.items():
        for pid in session_members(session):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                title = "launcher" if pid == session else " ".join(process.cmdline()[:1])[:40]
                rss = process.memory_info().rss
                if rss >= LARGE:
                    memory.setdefault(f"{role} {pid} {title}", []).append(rss)


def _show(out: Console, result: dict[str, Any]) -> None:
    verdicts = ", ".join(f"{count} {name}" for name, count in result["verdicts"].items())
    out.print(f"{result['requests']} requests, {result['concurrency']} at once: {verdicts}")
    out.print(
        f"checksums: {result['stretches_checked']} compared, {result['stretches_wrong']} wrong"
    )
    for cause in result["causes"]:
        out.print(f"failed: {cause}")
    table = Table(title="resident memory")
    for column in ("process", "after a third, MB", "at the end, MB", "growth"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, (first, *rest) in result["rss_bytes"].items():
        last = rest[-1] if rest else first
        table.add_row(name, f"{first / 1e6:.0f}", f"{last / 1e6:.0f}", f"{last / first - 1:+.1%}")
    out.print(table)
