"""`smartgen eval`: LongBench v1 in several arms, against running servers or pairs that it starts.

Every prediction is kept in the folder `--out` as soon as it has come; the same command goes on from
there after a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_smartgen.config import ConfigError
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.forced import FORCED_ARGS, spare_token
from sglang_smartgen.report.longbench import arms as arms_module
from sglang_smartgen.report.longbench import metrics, runner, scores
from sglang_smartgen.report.longbench.arms import STOCK, Arm
from sglang_smartgen.report.longbench.ask import Asker, Job
from sglang_smartgen.report.longbench.data import HUB, Item, load
from sglang_smartgen.report.longbench.folder import RunFolder
from sglang_smartgen.report.longbench.framing import REFERENCE_TOKENS, Framer
from sglang_smartgen.report.longbench.tasks import task_of, tasks
from sglang_smartgen.report.longbench.view import ProgressLine, table
from sglang_smartgen.report.machine import machine_facts
from sglang_smartgen.report.model_cache import ensure_model

LONGBENCH_E = "longbench-e"
QUICK_ITEMS, QUICK_NEW_TOKENS = 2, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen eval`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--model", help="model folder (default: the small model of this project)")
    parser.add_argument(
        "--data", required=True, help=f"folder with LongBench's TASK.jsonl files, or {HUB}"
    )
    parser.add_argument(
        "--tasks",
        help=f"comma-separated, or {LONGBENCH_E} for its 13 (default: all that the folder has)",
    )
    parser.add_argument(
        "--modes",
        default="smartgen,full,proactive_only,stock",
        help=f"of {', '.join(arms_module.MODES)} (%(default)s)",
    )
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one more arm with its own configuration; may be repeated",
    )
    parser.add_argument("--config", default="{}", help="what all arms share: JSON or a file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--url", help="router of running servers, for all arms but stock")
    parser.add_argument("--stock-url", help="router of running servers without SmartGen, for stock")
    parser.add_argument("--limit", type=int, help="so many items of each task, from the first on")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"--limit {QUICK_ITEMS} --max-new-tokens {QUICK_NEW_TOKENS}",
    )
    parser.add_argument("--max-prompt-tokens", type=int, help="cut prompts in the middle to these")
    parser.add_argument("--max-new-tokens", type=int, help="shorter answers than the task's own")
    parser.add_argument(
        "--likelihood",
        choices=("auto", "on", "off"),
        default="auto",
        help=f"score the references too; running servers need {FORCED_ARGS[0]} and this package "
        "(auto: on for servers that are started here)",
    )
    parser.add_argument(
        "--cold", action="store_true", help="prefill the prompt anew in every request"
    )
    parser.add_argument(
        "--parallel", type=int, default=1, help="items under way at once (%(default)s)"
    )
    parser.add_argument(
        "--log-dir", type=Path, help="keep the servers' logs here (default: a temporary folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when the table is complete.

    Raises ConfigError (DataError with file and line), ModelCacheError, ClusterError, RequestError.
    """
    with contextlib.ExitStack() as stack:
        stdout = stack.enter_context(result_stream(args.format))
        report = _Evaluation(args, stack).run()
        if args.format == "json":
            print(json.dumps(report), file=stdout)
        else:
            Console().print(table(report))
    return 0


class _Evaluation:
    """One run: what was asked for, checked before anything starts."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._args, self._view = args, ProgressLine()
        for flag in ("limit", "max_prompt_tokens", "max_new_tokens", "parallel"):
            value = getattr(args, flag)
            if value is not None and value < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
        self._limit = args.limit or (QUICK_ITEMS if args.quick else None)
        self._max_new = args.max_new_tokens or (QUICK_NEW_TOKENS if args.quick else None)
        self._arms = arms_module.parse_arms(
            args.modes, args.arm, args.config, own_pair=args.url is None
        )
        self._likelihood = args.likelihood == "on" or (
            args.likelihood == "auto" and args.url is None and args.stock_url is None
        )
        self._data = load(args.data, _task_names(args.tasks))
        metrics.check_libraries({task_of(task.name).metric for task in self._data})
        self._items: dict[str, tuple[Item, ...]] = {
            task.name: task.items[: self._limit] for task in self._data
        }
        self._model = Path(args.model) if args.model else ensure_model()
        if not (self._model / "config.json").is_file():
            raise ConfigError(f"--model is {self._model}; allowed is a folder with a config.json")
        self._logs = args.log_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-eval-"))
        )

    def run(self) -> dict[str, Any]:
        """Predict what is missing; the object that `--format json` prints."""
        with RunFolder(self._args.out) as folder:
            folder.open(self._settings(), self._arms, self._data)
            self._view.say("cutting the prompts")
            tokenizer = prompts.load_tokenizer(self._model)
            jobs = self._jobs(tokenizer)
            asks = self._how_to_ask(tokenizer, jobs)
            runner.run(
                folder,
                jobs,
                self._arms,
                lambda group: self._servers(group, jobs, asks),
                parallel=self._args.parallel,
                progress=self._view.predicted,
            )
            names = [arm.name for arm in self._arms]
            report = {
                "model": self._model.name,
                **scores.summary(folder.predictions, self._items, names),
                "machine": machine_facts(),
            }
            folder.write("scores.json", report)
        return report

    def _settings(self) -> dict[str, Any]:
        """What a prediction depends on, apart from its arm and its item."""
        return {
            "model": str(self._model.resolve()),
            "max_prompt_tokens": self._args.max_prompt_tokens,
            "max_new_tokens": self._max_new,
            "reference_tokens": REFERENCE_TOKENS if self._likelihood else None,
            "cold": self._args.cold,
        }

    def _jobs(self, tokenizer: Any) -> list[Job]:
        facts = json.loads((self._model / "config.json").read_text())
        framer = Framer(
            tokenizer,
            facts,
            max_prompt_tokens=self._args.max_prompt_tokens,
            max_new_tokens=self._max_new,
        )
        return [
            Job(item, framer.prompt(item), framer.new_tokens(task_of(item.task)))
            for items in self._items.values()
            for item in items
        ]

    def _how_to_ask(self, tokenizer: Any, jobs: list[Job]) -> dict[str, Any]:
        """The settings of every Asker."""
        references = [job.prompt.reference for job in jobs]
        return {
            "newline": int(tokenizer("\n", add_special_tokens=False)["input_ids"][-1]),
            "spare": spare_token(tokenizer, references) if self._likelihood else None,
            "cold": self._args.cold,
        }

    @contextlib.contextmanager
    def _servers(self, group: list[Arm], jobs: list[Job], asks: dict[str, Any]) -> Iterator[Asker]:
        stock = group[0].name == STOCK
        url = self._args.stock_url if stock else self._args.url
        if url is not None:
            yield Asker(url, **asks)
            return
        name = "the stock pair" if stock else f"the pair of {', '.join(arm.name for arm in group)}"
        longest = max(
            len(job.prompt.ids) + max(job.max_new_tokens, REFERENCE_TOKENS) for job in jobs
        )
        cluster = Cluster(
            self._model,
            config=group[0].pair,
            log_dir=self._logs / group[0].name,
            prefill_args=FORCED_ARGS if self._likelihood else (),
            decode_args=FORCED_ARGS if self._likelihood else (),
            max_total_tokens=max(20000, 3 * longest * self._args.parallel),
        )
        cluster.start(self._view.starting(name))
        try:
            yield Asker(cluster.url, **asks, check=cluster.check)
        finally:
            cluster.stop()


def _task_names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    if text == LONGBENCH_E:
        return [f"{name}_e" for name in tasks()]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--tasks is {text!r}; allowed is a list of tasks, each once")
    return names
