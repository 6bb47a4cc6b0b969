"""`smartgen demo`: one real question about a real text, answered by SmartGen and without it.

One SmartGen pair answers in all its modes (a request can override the mode), then a stock pair
takes its place. Every mode gets the same prompt, after a warm-up and with P's radix cache empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from sglang_smartgen.config import ConfigError, Mode, load_config
from sglang_smartgen.report import prompts, shaped
from sglang_smartgen.report.client import Answer, Client, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.demo_view import JsonView, TerminalView, View
from sglang_smartgen.report.model_cache import ensure_model

STOCK = "stock"
MODES = (*get_args(Mode), STOCK)
WARM_UP_TOKENS = 300  # more than `min_prompt_len`, so that the warm-up takes SmartGen's path
RECORD_TIMEOUT_S = 5.0
BYTE_FIELDS = ("bytes_proactive", "bytes_metadata", "bytes_on_demand", "bytes_speculative")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen demo`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--model", help="model folder (default: the small model of this project)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=2000, help="length of the prompt (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=48, help="length of the answer (%(default)s)"
    )
    parser.add_argument("--config", default="{}", help="SmartGen's configuration: JSON or a file")
    parser.add_argument(
        "--modes",
        default="smartgen,full,stock",
        help=f"what to compare, of {', '.join(MODES)} (%(default)s)",
    )
    parser.add_argument(
        "--mbit", type=int, help="hold all traffic between the servers to this rate (needs root)"
    )
    parser.add_argument(
        "--log-dir", type=Path, help="keep the servers' logs here (default: a temporary folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every mode answered.

    Raises ConfigError, ModelCacheError, ClusterError or RequestError, all with one sentence.
    """
    shaped.enter(args.mbit)
    with contextlib.ExitStack() as stack:
        view: View = TerminalView()
        if args.format == "json":
            view = JsonView(sys.stdout)
            # Whatever a library prints must not get between the caller and the JSON.
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        report = _run(args, view, _log_dir(args.log_dir, stack))
        view.report(report)
    return 0


def _run(args: argparse.Namespace, view: View, log_dir: Path) -> dict[str, Any]:
    modes = parse_modes(args.modes)
    config = msgspec.to_builtins(load_config(args.config))
    if args.max_new_tokens < 2:
        raise ConfigError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 2")
    with view.working("preparing the model and the prompt"):
        model = Path(args.model) if args.model else ensure_model()
        if not (model / "config.json").is_file():
            raise ConfigError(f"--model is {model}; allowed is a folder with a config.json")
        demo = Demo(model, config, args.prompt_tokens, args.max_new_tokens, view, log_dir)
    return demo.run(modes)


class Demo:
    """The prompts of one run and the pairs that answer them."""

    def __init__(
        self,
        model: Path,
        config: dict[str, Any],
        prompt_tokens: int,
        max_new_tokens: int,
        view: View,
        log_dir: Path,
    ) -> None:
        facts = json.loads((model / "config.json").read_text())
        limit = facts.get("max_position_embeddings", prompt_tokens + max_new_tokens)
        if prompt_tokens + max_new_tokens > limit:
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens} and --max-new-tokens {max_new_tokens} are more "
                f"than the {limit} positions of the model"
            )
        tokenizer, text = prompts.load_tokenizer(model), prompts.demo_text()
        try:
            self._prompt = prompts.question_prompt(tokenizer, text, prompts.QUESTION, prompt_tokens)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # The end of the text: no prefix of it is a prefix of the prompt.
        self._warm_up = prompts.text_prompt(tokenizer, text, WARM_UP_TOKENS, start=1000)
        self._model, self._config, self._log_dir = model, config, log_dir
        self._max_new_tokens = max_new_tokens
        self._token_bytes = kv_token_bytes(facts)
        self._view = view

    def run(self, modes: list[str]) -> dict[str, Any]:
        """Answer in every mode; the object that `--format json` prints."""
        answers: dict[str, str] = {}
        rows: dict[str, dict[str, Any]] = {}
        self._view.question(prompts.QUESTION, len(self._prompt))
        ours = [mode for mode in modes if mode != STOCK]
        for name, config, group in (
            ("SmartGen", self._config, ours),
            ("stock SGLang", None, modes[len(ours) :]),
        ):
            if not group:
                continue
            with self._pair(name, config) as cluster:
                for mode in group:
                    answer, row = self._ask(cluster, mode)
                    answers[mode], rows[mode] = answer.text, row
        return {
            "model": self._model.name,
            "prompt_tokens": len(self._prompt),
            "answer": answers,
            "modes": rows,
        }

    @contextlib.contextmanager
    def _pair(self, name: str, config: dict[str, Any] | None) -> Iterator[Cluster]:
        length = len(self._prompt) + self._max_new_tokens
        cluster = Cluster(
            self._model,
            config=config,
            log_dir=self._log_dir,
            max_total_tokens=max(8192, 3 * length),
        )
        with self._view.starting(name) as progress:
            cluster.start(progress)
        try:
            yield cluster
        finally:
            cluster.stop()

    def _ask(self, cluster: Cluster, mode: str) -> tuple[Answer, dict[str, Any]]:
        overrides = None if mode == STOCK else {"mode": mode}
        client = Client(cluster.url)
        with self._view.working(f"{mode}: warm-up"):
            warm = client.generate(self._warm_up, max_new_tokens=4, smartgen=overrides)
            self._require(warm, mode, "warm-up")
            cluster.flush_cache("prefill")
        rid = f"demo-{mode}-{uuid.uuid4().hex[:8]}"
        with self._view.answering(mode) as on_text:
            answer = client.generate(
                self._prompt,
                max_new_tokens=self._max_new_tokens,
                smartgen=overrides,
                rid=rid,
                on_text=on_text,
            )
        self._require(answer, mode, "request")
        if answer.cached_tokens:
            raise RequestError(
                f"prefill reused {answer.cached_tokens} cached tokens in mode {mode}, although its "
                "cache was flushed; the times would not be comparable"
            )
        return answer, self._row(cluster, mode, answer, rid)

    def _require(self, answer: Answer, mode: str, what: str) -> None:
        if answer.error is not None:
            raise RequestError(f"the {what} in mode {mode} failed: {answer.error}")

    def _row(self, cluster: Cluster, mode: str, answer: Answer, rid: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "ttft_s": answer.ttft_s,
            "ttst_s": answer.ttst_s,
            "tbt_s": answer.tbt_s,
        }
        if mode == STOCK:
            # Stock SGLang counts no bytes; it sends the whole KV once, before decode starts.
            row |= dict.fromkeys(BYTE_FIELDS, 0)
            row["bytes_proactive"] = len(self._prompt) * self._token_bytes
            row["local_share_at_start"] = 1.0
            return row
        record = finished_record(cluster, rid)
        if record["failure"]:
            raise RequestError(f"the request in mode {mode} failed: {record['failure']}")
        return row | {field: record[field] for field in (*BYTE_FIELDS, "local_share_at_start")}


def finished_record(cluster: Cluster, rid: str) -> dict[str, Any]:
    """D's record of a finished request. Raises RequestError when there is none in time."""
    deadline = time.monotonic() + RECORD_TIMEOUT_S
    while True:
        for record in cluster.smartgen_state("decode")["finished"]:
            if record["rid"] == rid:
                return dict(record)
        if time.monotonic() > deadline:
            raise RequestError(f"the decode server has no record of request {rid}")
        time.sleep(0.2)


def kv_token_bytes(facts: dict[str, Any]) -> int:
    """Bytes of K and V of one token in all layers in float32, from a model's config.json."""
    heads = facts.get("num_key_value_heads") or facts["num_attention_heads"]
    head_dim = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    return int(2 * facts["num_hidden_layers"] * heads * head_dim * 4)


def parse_modes(text: str) -> list[str]:
    """The modes of `--modes`, stock last. Raises ConfigError for a list that cannot be used."""
    modes = [mode.strip() for mode in text.split(",") if mode.strip()]
    if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(MODES):
        raise ConfigError(
            f"--modes is {text!r}; allowed is a list of {', '.join(MODES)}, each once"
        )
    return sorted(modes, key=lambda mode: mode == STOCK)


def _log_dir(given: Path | None, stack: contextlib.ExitStack) -> Path:
    if given is not None:
        return given
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-demo-")))
