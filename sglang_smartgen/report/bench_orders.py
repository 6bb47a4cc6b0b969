"""`smartgen bench orders`: the order of blocks, arm beside arm on the same requests.

First a profile is made from calibration texts (or `--profile` names one), then one pair answers
every test prompt in every order, with K_r fixed and no speculative fill, so that what was not
pushed in time has to be fetched. Fetched entries are kept, so a second number says what the steps
needed from P if nothing were kept, as the paper counts. A last part shows the time of each step
with speculative fill at several credits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import uuid
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from sglang_smartgen.calibrate.progress import TimeLeft
from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.core.orders import ORDERS
from sglang_smartgen.core.recordings import RECORD_DIR_ENV
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import prompts, shaped
from sglang_smartgen.report.client import Answer, Client, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.demo import finished_record
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.order_report import Arm, Measured, needed_bytes, report, show
from sglang_smartgen.report.profile_prompts import cut_prompts
from sglang_smartgen.report.select_texts import calibration_texts, held_out_texts

CONFIG = '{"ratio": 0.1, "selector": "exact", "blocks_per_layer": 256}'
FILL = {"0": 0.0, "0.05": 0.05, "0.1": 0.1, "0.2": 0.2}
FULL = "full"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench orders`."""
    parser.add_argument(
        "--config", default=CONFIG, help="of the pair: JSON or a file (%(default)s)"
    )
    parser.add_argument("--profile", type=Path, help="use this profile (default: make one)")
    parser.add_argument(
        "--work", type=Path, help="keep recordings and profile here, and reuse them"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1536, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=48, help="tokens of an answer (%(default)s)")
    parser.add_argument("--texts", type=int, default=6, help="test prompts (%(default)s)")
    parser.add_argument(
        "--share", default="0.25,0.4", help="K_r as shares of all blocks (%(default)s)"
    )
    parser.add_argument(
        "--fill-texts", type=int, default=2, help="prompts of the part on fill (%(default)s)"
    )
    parser.add_argument("--mbit", type=int, help="rate of the network (default: not shaped)")
    parser.add_argument("--quick", action="store_true", help="one text, few steps: does it run?")
    parser.add_argument(
        "--out", type=Path, help="append the report as a line of JSON, for smartgen plot"
    )
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every request was answered.

    Raises ConfigError, ModelCacheError, ClusterError, RequestError or CalibrationError.
    """
    if args.quick:
        args.texts, args.fill_texts, args.steps, args.share = 1, 1, 8, "0.25"
    shares = parse_shares(args.share)
    for flag in ("texts", "steps", "prompt_tokens"):
        if getattr(args, flag) < 1:
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} is {getattr(args, flag)}; it must be at least 1")
    shaped.enter(args.mbit)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(result_stream(args.format))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-orders-")))
        found = Bench(args, shares, args.work or scratch, scratch / "logs").run()
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if args.format == "json":
            print(json.dumps(found), file=out, flush=True)
        else:
            show(found)
    return 0


def parse_shares(text: str) -> list[float]:
    """Parse `0.25,0.4`. Raises ConfigError unless each is above 0 and at most 1."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"--share is {text!r}; allowed is a list of numbers above 0, at most 1")
    return shares


def arms_of(shares: list[float]) -> list[Arm]:
    """Every order at every share; `observed` first, since P's radix cache must be empty for it.

    P sees the last queries of a prompt only when it computes them; the other orders push the same
    whether the prompt was cached or not, and are seconds faster when it was.
    """
    orders = sorted(ORDERS, key=lambda order: (order != "observed", order == "oracle"))
    return [Arm(order, share) for order in orders for share in shares]


class Bench:
    """The requests of one run, on one pair after the profile's."""

    def __init__(
        self, args: argparse.Namespace, shares: list[float], work: Path, log_dir: Path
    ) -> None:
        self._args, self._shares, self._work, self._log_dir = args, shares, work, log_dir
        self._model = ensure_model()
        self._config = msgspec.to_builtins(load_config(args.config))
        self._facts = json.loads((self._model / "config.json").read_text())
        self._console = Console(stderr=True)
        tokenizer = prompts.load_tokenizer(self._model)
        self._texts = [
            (name, list(tokenizer(text, add_special_tokens=False)["input_ids"]))
            for name, text in held_out_texts().items()
        ]

    def run(self) -> dict[str, Any]:
        """Measure; the object that `--format json` prints."""
        self._work.mkdir(parents=True, exist_ok=True)
        recordings = self._work / "selections"
        recordings.mkdir(exist_ok=True)
        profile = self._args.profile or self._make_profile()
        length = self._args.prompt_tokens
        wanted = cut_prompts(
            self._texts, [(length, length + 1)], per_range=self._args.texts, settings={}
        )
        cluster = Cluster(
            self._model,
            config={**self._config, "profile": str(profile)},
            log_dir=self._log_dir,
            max_total_tokens=max(8192, 3 * (length + self._args.steps)),
            env={RECORD_DIR_ENV: str(recordings.resolve())},
        )
        self._say("starting the pair with the profile")
        with cluster:
            Client(cluster.url).generate(wanted[0].token_ids[-400:], max_new_tokens=4)
            ids = [prompt.token_ids for prompt in wanted]
            orders = self._orders(cluster, recordings, ids)
            steps = self._fill(cluster, ids[: self._args.fill_texts])
        about = {
            "model": self._model.name,
            "config": {key: self._config[key] for key in ("selector", "ratio", "blocks_per_layer")},
            "prompt_tokens": length,
            "steps": self._args.steps,
            "texts": [prompt.data_set for prompt in wanted],
            "mbit": self._args.mbit,
        }
        return report(about, orders, steps)

    def _make_profile(self) -> Path:
        from sglang_smartgen.core.profile import write_profile
        from sglang_smartgen.report.profile import Recorder

        self._say("making a profile from the calibration texts")
        recorder = Recorder(
            self._model, self._config, self._work / "calibration", self._log_dir, self._args.steps
        )
        tokens = self._args.prompt_tokens
        count = 1 if self._args.quick else len(calibration_texts())
        made = recorder.profile(list(calibration_texts().items()), [(tokens, tokens + 1)], count)
        path = self._work / "profile.safetensors"
        write_profile(path, made)
        return path

    def _orders(self, cluster: Cluster, folder: Path, texts: list[list[int]]) -> list[Measured]:
        arms = arms_of(self._shares)
        left = TimeLeft(len(texts) * len(arms), 0)
        found: list[Measured] = []
        run = uuid.uuid4().hex[:8]
        for number, ids in enumerate(texts):
            names: list[str] = []
            for arm in arms:
                self._say(
                    f"text {number + 1} of {len(texts)}, {arm.order} at {arm.share:.0%}, "
                    f"{left.text(len(found))}"
                )
                if arm.order == "observed":
                    cluster.flush_cache("prefill")
                name = f"{run}-{number}-{arm.order}-{arm.share}"
                names.append(name)
                overrides = self._smartgen(arm) | {"record": name}
                if arm.order == "oracle":
                    overrides["recording"] = names[0]
                answer, record = self._ask(cluster, ids, overrides)
                found.append(
                    Measured(
                        arm=arm,
                        text=number,
                        answer=answer.token_ids,
                        fetched_bytes=record["bytes_on_demand"],
                        needed_bytes=needed_bytes(folder / f"{name}.npz", self._entry_bytes()),
                        local_share=record["local_share_at_start"],
                    )
                )
        return found

    def _fill(self, cluster: Cluster, texts: list[list[int]]) -> dict[str, list[float]]:
        """Median seconds of each step by fixed credit, and with everything local from the start."""
        steps: dict[str, list[float]] = {}
        share = self._shares[0]
        for name, ratio in [*FILL.items(), (FULL, 0.0)]:
            self._say(f"time of each step, fill {name}")
            overrides = self._smartgen(Arm("profile", share))
            overrides |= {"speculative_ratio": ratio, "credit": "fixed"}
            if name == FULL:
                overrides = {"mode": FULL, "ratio": self._config["ratio"]}
            rows = [self._ask(cluster, ids, overrides)[0].inter_token_s for ids in texts]
            steps[name] = [statistics.median(step) for step in zip(*rows, strict=True)]
        return steps

    def _smartgen(self, arm: Arm) -> dict[str, Any]:
        blocks = self._facts["num_hidden_layers"] * self._config["blocks_per_layer"]
        return {
            "order": arm.order,
            "proactive_blocks": max(1, int(arm.share * blocks)),
            "speculative_ratio": 0.0,
        }

    def _entry_bytes(self) -> int:
        facts = self._facts
        head = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
        return int(2 * head * 4)  # the cluster runs float32

    def _ask(
        self, cluster: Cluster, ids: list[int], overrides: dict[str, Any]
    ) -> tuple[Answer, dict[str, Any]]:
        rid = f"orders-{uuid.uuid4().hex[:12]}"
        answer = Client(cluster.url).generate(
            ids, max_new_tokens=self._args.steps, ignore_eos=True, smartgen=overrides, rid=rid
        )
        if answer.error is not None:
            raise RequestError(f"a request with {overrides} failed: {answer.error}")
        record = finished_record(cluster, rid)
        if record["failure"] or record["fallback"]:
            why = record["failure"] or record["fallback"]
            raise RequestError(f"a request with {overrides} was not SmartGen's: {why}")
        return answer, record

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
