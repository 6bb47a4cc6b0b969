"""`smartgen bench agreement`: does selection change what the model says next, through real servers?

Held-out texts are prefilled by P; D decodes what follows in them, token by token (teacher-forced),
with 20 % of the prompt's entries a step, and the most likely next tokens are compared with those of
full attention on the same servers. Artifacts are those of `bench select`, made where they lack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_smartgen.config import ConfigError
from sglang_smartgen.output import result_stream
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.model_cache import cache_root, ensure_model

FULL_ATTENTION: dict[str, Any] = {"mode": "full", "ratio": 1.0}
# Selector -> needs an artifact.
SELECTORS = {"exact": False, "infinigen": True, "hata": True}

LOOKAHEAD = {"both": (False, True), "on": (True,), "off": (False,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench agreement`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--selectors", default=",".join(SELECTORS), help="(%(default)s)")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=256, help="of a text (%(default)s)")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--lookahead", choices=tuple(LOOKAHEAD), default="both")
    parser.add_argument("--artifacts-dir", type=Path, help="(default: in SmartGen's cache folder)")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every text was answered, whatever the figures say."""
    names = args.selectors.split(",")
    if unknown := set(names) - set(SELECTORS):
        raise ConfigError(f"--selectors has {', '.join(unknown)}; allowed: {', '.join(SELECTORS)}")
    with result_stream(args.format):
        result = _measure(args, names, Console(stderr=True))
        _show(Console(), result)
    if args.format == "json":
        print(json.dumps(result))
    return 0


def _measure(args: argparse.Namespace, names: list[str], log: Console) -> dict[str, Any]:
    from sglang_smartgen.calibrate.model import LayeredModel
    from sglang_smartgen.report.bench_select import FULL, sequences_of
    from sglang_smartgen.report.forced import FORCED_ARGS, Forced, force, spare_token
    from sglang_smartgen.report.prompts import load_tokenizer
    from sglang_smartgen.report.select_arms import artifact_path, ensure_artifact

    model = LayeredModel(ensure_model())
    size = FULL._replace(texts=args.texts, new_tokens=args.steps + 1)
    calibration, held_out = sequences_of(model, args.prompt_tokens, size)
    texts = list(held_out.values())
    spare = spare_token(load_tokenizer(model.folder), texts)
    folder = args.artifacts_dir or cache_root() / "artifacts"

    def decode(url: str, arm: dict[str, Any]) -> list[Forced]:
        def one(ids: list[int]) -> Forced:
            prompt, answer = ids[: args.prompt_tokens], ids[args.prompt_tokens :]
            return force(url, prompt, answer, spare, arm)

        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(one, texts))

    found: dict[str, list[Forced]] = {}
    for name in names:
        config: dict[str, Any] = {"selector": name, "ratio": args.ratio}
        if SELECTORS[name]:
            ensure_artifact(model, calibration, name, folder)
            config["artifact"] = str(artifact_path(model, calibration, name, folder))
        with tempfile.TemporaryDirectory(prefix="smartgen-agreement-") as logs:
            most = (args.prompt_tokens + args.steps) * len(texts) + 1024
            cluster = Cluster(
                model.folder,
                config=config,
                log_dir=Path(logs),
                max_total_tokens=most,
                prefill_args=FORCED_ARGS,
                decode_args=FORCED_ARGS,
            )
            with cluster:
                if not found:
                    log.print("full attention ...")
                    found["full attention"] = decode(cluster.url, FULL_ATTENTION)
                for lookahead in LOOKAHEAD[args.lookahead]:
                    arm = f"{name}+lookahead" if lookahead else name
                    log.print(f"{arm} ...")
                    found[arm] = decode(cluster.url, {"lookahead": lookahead})
    return summary(found)


def summary(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Agreement with the first arm, and mean log probability of the texts, by arm."""
    reference = next(iter(found.values()))
    agreement: dict[str, float] = {}
    likelihood: dict[str, float] = {}
    for arm, answers in found.items():
        pairs = [
            (mine, wanted)
            for answer, other in zip(answers, reference, strict=True)
            for mine, wanted in zip(answer.preferred, other.preferred, strict=True)
        ]
        agreement[arm] = sum(mine == wanted for mine, wanted in pairs) / len(pairs)
        logprobs = [logprob for answer in answers for logprob in answer.logprobs]
        likelihood[arm] = sum(logprobs) / len(logprobs)
    return {"agreement": agreement, "mean_logprob": likelihood}


def _show(out: Console, result: dict[str, Any]) -> None:
    table = Table(title="next token, teacher-forced through prefill and decode servers")
    for column in ("arm", "agrees with full attention", "mean log probability of the text"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, share in result["agreement"].items():
        table.add_row(arm, f"{share:.1%}", f"{result['mean_logprob'][arm]:.4f}")
    out.print(table)
