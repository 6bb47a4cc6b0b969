"""`smartgen profile TEXT... --out FILE`: what requests select, by length, through a real pair.

Every calibration prompt goes through a prefill and a decode server with the selector and settings
of production; decode records what each step selects. Recordings stay in `--work`, so that the same
command, started again, runs only what is missing. The last step adds them up to the profile.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from sglang_smartgen.calibrate.progress import TimeLeft
from sglang_smartgen.config import ConfigError, load_config
from sglang_smartgen.core.recordings import RECORD_DIR_ENV
from sglang_smartgen.output import result_stream
from sglang_smartgen.report import profile_view, prompts
from sglang_smartgen.report.client import Client, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.demo import WARM_UP_TOKENS, finished_record, kv_token_bytes
from sglang_smartgen.report.demo_view import JsonView
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.profile_prompts import (
    ProfilePrompt,
    cut_prompts,
    parse_ranges,
    read_texts,
)

BANDWIDTHS_MBIT = (20, 50, 100, 1000, 10_000, 25_000)
RECORDING_TIMEOUT_S = 10.0
SETTINGS = ("selector", "ratio", "lookahead", "blocks_per_layer", "artifact")
"""Config keys that change what is selected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen profile`."""
    parser.add_argument(
        "text",
        nargs="*",
        metavar="[SET=]TEXT",
        help="text files, SET names the data set (default: texts of the package)",
    )
    parser.add_argument("--out", type=Path, required=True, help="the profile's file")
    parser.add_argument("--png", type=Path, help="draw the importance map here (default: by --out)")
    parser.add_argument("--work", type=Path, help="folder of the recordings (default: by --out)")
    parser.add_argument("--model", help="model folder (default: the small model of this project)")
    parser.add_argument("--config", default="{}", help="SmartGen's configuration: JSON or a file")
    parser.add_argument(
        "--ranges", default="1024-2048,2048-4096", help="ranges of prompt tokens (%(default)s)"
    )
    parser.add_argument(
        "--per-range", type=int, default=6, help="prompts of each range (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=48, help="decode steps of each (%(default)s)"
    )
    parser.add_argument(
        "--bandwidth-mbit",
        type=float,
        action="append",
        help="show K_r at this bandwidth; may be repeated "
        f"(default: {', '.join(map(str, BANDWIDTHS_MBIT))})",
    )
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Record what is missing and write the profile; 0 when it is written.

    Raises ConfigError, ModelCacheError, ClusterError, RequestError or CalibrationError.
    """
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(result_stream(args.format))
        log_dir = args.log_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="smartgen-profile-"))
        )
        report = _run(args, log_dir)
        if args.format == "json":
            print(json.dumps(report), file=out, flush=True)
        else:
            profile_view.show(report)
    return 0


def _run(args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    from sglang_smartgen.calibrate.profile import k_r_table, warnings
    from sglang_smartgen.calibrate.profile_map import draw_map
    from sglang_smartgen.core.profile import write_profile

    began = time.monotonic()
    config = load_config(args.config)
    ranges, texts = parse_ranges(args.ranges), read_texts(args.text)
    for field in ("per_range", "max_new_tokens"):
        if getattr(args, field) < 1:
            flag = "--" + field.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(args, field)}; it must be at least 1")
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise ConfigError(f"--out is {args.out}; allowed is a file in a folder that exists")
    model = Path(args.model) if args.model else ensure_model()
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model is {model}; allowed is a folder with a config.json")
    work = args.work or args.out.with_name(args.out.name + ".recordings")
    recorder = Recorder(model, msgspec.to_builtins(config), work, log_dir, args.max_new_tokens)
    profile = recorder.profile(texts, ranges, args.per_range)
    write_profile(args.out, profile)
    picture = args.png or args.out.with_suffix(".png")
    draw_map(profile, picture)
    bandwidths = args.bandwidth_mbit or list(BANDWIDTHS_MBIT)
    table = k_r_table(profile, [mbit * 1e6 / 8 for mbit in bandwidths])
    manifest = profile.manifest
    return {
        "profile": str(args.out),
        "png": str(picture),
        "model": model.name,
        "selector": manifest.selector,
        "ratio": manifest.ratio,
        "ranges": [msgspec.to_builtins(r) for r in manifest.ranges],
        "similarity": msgspec.to_builtins(manifest.similarity),
        "warnings": warnings(manifest.similarity),
        "all_blocks": [
            manifest.layers * min(manifest.blocks, round(r.prompt_tokens)) for r in manifest.ranges
        ],
        "bandwidth_mbit": bandwidths,
        "k_r": table,
        "seconds": time.monotonic() - began,
    }


class Recorder:
    """Runs the prompts whose recordings are missing, one at a time, on one pair of servers."""

    def __init__(
        self, model: Path, config: dict[str, Any], work: Path, log_dir: Path, new_tokens: int
    ) -> None:
        from sglang_smartgen.select.artifact import model_hash

        self._model, self._config, self._work = model, config, work
        self._log_dir, self._new_tokens = log_dir, new_tokens
        self._facts = json.loads((model / "config.json").read_text())
        self._hash = model_hash(model)
        self._view = JsonView(sys.stderr)

    def profile(
        self, texts: list[tuple[str, str]], ranges: list[tuple[int, int]], per_range: int
    ) -> Any:
        """Record what is missing and add it up to a `core.profile.Profile`."""
        from sglang_smartgen.calibrate.profile import make_profile

        wanted = self.prompts(texts, ranges, per_range)
        recordings = self.record(wanted)
        return make_profile(
            recordings,
            ranges,
            model=self.shape(wanted, recordings),
            blocks=self._config["blocks_per_layer"],
            text_hash=hashlib.sha256("".join(p.name for p in wanted).encode()).hexdigest()[:32],
            versions=_versions(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def prompts(
        self, texts: list[tuple[str, str]], ranges: list[tuple[int, int]], per_range: int
    ) -> list[ProfilePrompt]:
        """The prompts of a run. Raises ConfigError when texts or model are too short."""
        limit = self._facts.get("max_position_embeddings", 1 << 30)
        longest = ranges[-1][1] + self._new_tokens
        if longest > limit:
            raise ConfigError(
                f"--ranges and --max-new-tokens ask for {longest} tokens; the model has {limit} "
                "positions"
            )
        tokenizer = prompts.load_tokenizer(self._model)
        contents = [
            (name, list(tokenizer(text, add_special_tokens=False)["input_ids"]))
            for name, text in texts
        ]
        settings = {key: self._config.get(key) for key in SETTINGS}
        settings |= {"model": self._hash, "steps": self._new_tokens}
        return cut_prompts(contents, ranges, per_range=per_range, settings=settings)

    def record(self, wanted: Sequence[ProfilePrompt]) -> list[Any]:
        """Recordings of all prompts (`calibrate.profile.Recording`), old ones as they are."""
        from sglang_smartgen.calibrate.profile import read_recording

        self._work.mkdir(parents=True, exist_ok=True)
        missing = [prompt for prompt in wanted if not self._done(prompt)]
        if missing:
            self._run_missing(missing, len(wanted))
        return [
            read_recording(
                self._path(prompt), prompt.data_set, self._notes(prompt).get("bandwidth")
            )
            for prompt in wanted
        ]

    def shape(self, wanted: Sequence[ProfilePrompt], recordings: Sequence[Any]) -> Any:
        """The model's shape (`calibrate.profile.ModelShape`), with what metadata really took."""
        from sglang_smartgen.calibrate.profile import ModelShape

        facts = self._facts
        layers = facts["num_hidden_layers"]
        metadata = [self._notes(p)["bytes_metadata"] / len(p.token_ids) for p in wanted]
        return ModelShape(
            model_hash=self._hash,
            layers=layers,
            kv_heads=facts.get("num_key_value_heads") or facts["num_attention_heads"],
            head_dim=facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"],
            sparse_layers=sparse_layers(facts, int(recordings[0].counts.shape[0])),
            token_bytes=kv_token_bytes(facts),
            metadata_token_bytes=sum(metadata) / len(metadata),
        )

    def _path(self, prompt: ProfilePrompt) -> Path:
        return self._work / f"{prompt.name}.npz"

    def _notes(self, prompt: ProfilePrompt) -> dict[str, Any]:
        notes: dict[str, Any] = json.loads((self._work / f"{prompt.name}.json").read_text())
        return notes

    def _done(self, prompt: ProfilePrompt) -> bool:
        # The notes are written last.
        return self._path(prompt).is_file() and (self._work / f"{prompt.name}.json").is_file()

    def _run_missing(self, missing: Sequence[ProfilePrompt], total: int) -> None:
        longest = max(len(prompt.token_ids) for prompt in missing) + self._new_tokens
        cluster = Cluster(
            self._model,
            # Nothing depends on the order here, and the profile of the config may not be there yet.
            config={**self._config, "order": "sequential", "profile": ""},
            log_dir=self._log_dir,
            max_total_tokens=max(8192, 3 * longest),
            env={RECORD_DIR_ENV: str(self._work.resolve())},
        )
        with self._view.starting("SmartGen") as progress:
            cluster.start(progress)
        try:
            self._warm_up(cluster, missing[0])
            left = TimeLeft(total, total - len(missing))
            for done, prompt in enumerate(missing, total - len(missing)):
                what = f"recording {done + 1} of {total}, {left.text(done)}: {prompt.name}"
                with self._view.working(what):
                    self._ask(cluster, prompt)
        finally:
            cluster.stop()

    def _warm_up(self, cluster: Cluster, prompt: ProfilePrompt) -> None:
        """The first request of a server is slow; T_p must not hold it."""
        ids = prompt.token_ids[-WARM_UP_TOKENS:]
        answer = Client(cluster.url).generate(ids, max_new_tokens=4)
        if answer.error is not None:
            raise RequestError(f"the warm-up failed: {answer.error}")

    def _ask(self, cluster: Cluster, prompt: ProfilePrompt) -> None:
        cluster.flush_cache("prefill")
        rid = f"profile-{uuid.uuid4().hex[:12]}"
        answer = Client(cluster.url).generate(
            prompt.token_ids,
            max_new_tokens=self._new_tokens,
            ignore_eos=True,
            # What is selected does not depend on what was local; decode is fastest like this.
            smartgen={"mode": "full", "record": prompt.name},
            rid=rid,
        )
        if answer.error is not None:
            raise RequestError(f"prompt {prompt.name} failed: {answer.error}")
        record = finished_record(cluster, rid)
        if record["failure"] or record["fallback"]:
            why = record["failure"] or record["fallback"]
            raise RequestError(f"prompt {prompt.name} was not recorded: {why}")
        self._wait_for(self._path(prompt))
        notes = {
            "bytes_metadata": record["bytes_metadata"],
            "bandwidth": cluster.smartgen_state("prefill").get("bandwidth"),
        }
        part = self._work / f"{prompt.name}.json.part"
        part.write_text(json.dumps(notes))
        part.replace(self._work / f"{prompt.name}.json")

    @staticmethod
    def _wait_for(path: Path) -> None:
        deadline = time.monotonic() + RECORDING_TIMEOUT_S
        while not path.is_file():
            if time.monotonic() > deadline:
                raise RequestError(
                    f"the decode server wrote no recording {path.name} within "
                    f"{RECORDING_TIMEOUT_S:.0f} s"
                )
            time.sleep(0.1)


def sparse_layers(facts: dict[str, Any], count: int) -> list[int]:
    """The `count` layers that were selected from, by the model's config.json.

    Raises ConfigError when the config does not have as many.
    """
    kinds = facts.get("layer_types") or ["full_attention"] * facts["num_hidden_layers"]
    layers = [i for i, kind in enumerate(kinds) if i >= 2 and kind == "full_attention"]
    if len(layers) != count:
        raise ConfigError(
            f"the recordings have {count} layers; by its config.json the model is selected from in "
            f"{len(layers)}"
        )
    return layers


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("sglang-smartgen", "sglang", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
