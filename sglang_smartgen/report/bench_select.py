"""`smartgen bench select`: how well each selector chooses, and what it costs.

Captured attention mass on real models and held-out texts, agreement of the next token with full
attention, and the cost of a selection. What has to be calibrated is calibrated first, on other
texts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smartgen.config import ConfigError
from sglang_smartgen.output import result_stream
from sglang_smartgen.report.model_cache import cache_root, ensure_gemma3, ensure_model

if TYPE_CHECKING:
    from sglang_smartgen.calibrate.model import LayeredModel
    from sglang_smartgen.report.select_report import Report

MODELS = ("smollm2", "gemma3")
TOKENS = {"smollm2": 3000, "gemma3": 6000}
DEFAULT_TOKENS = 3000
NEW_TOKENS = 256
# One of each calibration text, as long as the measured prompts but not longer than this.
CALIBRATION_SEQUENCES, CALIBRATION_TOKENS = 4, 3072


class Size(NamedTuple):
    """How much is measured."""

    texts: int
    queries: int  # a text
    new_tokens: int  # of the agreement


FULL, QUICK = Size(4, 32, NEW_TOKENS), Size(1, 8, 32)
QUICK_TOKENS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench select`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="smollm2, gemma3 (fetched the first time) or a model folder; may be repeated "
        f"(default: {' and '.join(MODELS)})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"smollm2 only, {QUICK_TOKENS} tokens of one text: minutes become seconds, "
        "and the figures are rough",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens of a text (default: 3000 for smollm2 and folders, 6000 for gemma3)",
    )
    parser.add_argument(
        "--artifacts-dir",
        type=Path,
        help="where artifacts are kept (default: artifacts in SmartGen's cache folder)",
    )
    parser.add_argument(
        "--out-dir",
        type=Path,
        default=Path("bench-select"),
        help="folder of select.jsonl and select.png (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when everything was measured, whatever the figures say.

    Raises ConfigError, CalibrationError or ModelCacheError, all with one sentence.
    """
    from sglang_smartgen.report.select_report import Report

    with result_stream(args.format) as out:
        names = check_arguments(args)
        report = Report(quick=args.quick)
        steps = [(_mass_and_cost, name) for name in names] + [(_agreement, names[0])]
        for measure, name in steps:
            measure(_Subject(name, args), report)
            jsonl, png = report.write(args.out_dir)  # what is measured survives a later failure
        if args.format == "json":
            print(json.dumps(report.result()), file=out, flush=True)
        else:
            report.show(jsonl, png)
    return 0


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Return the models to measure. Raises ConfigError for arguments that cannot be used."""
    names: list[str] = args.model or list(MODELS[:1] if args.quick else MODELS)
    for name in names:
        if name not in MODELS and not (Path(name) / "config.json").is_file():
            raise ConfigError(
                f"--model is {name}; allowed are {', '.join(MODELS)} and a folder with a "
                "config.json"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"--model is {', '.join(names)}; each model is allowed once")
    if args.tokens is not None and args.tokens < QUICK_TOKENS // 2:
        raise ConfigError(f"--tokens is {args.tokens}; it must be at least {QUICK_TOKENS // 2}")
    try:
        args.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out-dir is {args.out_dir}: {error.strerror}") from None
    return names


class _Subject:
    """A model with its texts and selectors; calibrates what is missing."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from sglang_smartgen.calibrate.artifacts import selected_layers
        from sglang_smartgen.calibrate.model import LayeredModel
        from sglang_smartgen.report.select_arms import make_selectors

        self.size = QUICK if args.quick else FULL
        default = QUICK_TOKENS if args.quick else TOKENS.get(name, DEFAULT_TOKENS)
        self.tokens: int = args.tokens or default
        self.model = LayeredModel(_folder(name))
        self.label = self.model.folder.name
        calibration, held_out = sequences_of(self.model, self.tokens, self.size)
        self.titles, self.texts = list(held_out), list(held_out.values())
        self.layers = selected_layers(self.model)
        folder = args.artifacts_dir or cache_root() / "artifacts"
        self.selectors = make_selectors(self.model, calibration, folder)


def _mass_and_cost(subject: _Subject, report: Report) -> None:
    from sglang_smartgen.calibrate.progress import layer_progress
    from sglang_smartgen.report.captured_mass import measure_mass
    from sglang_smartgen.report.select_cost import measure_cost

    model, label, tokens = subject.model, subject.label, subject.tokens
    layers, selectors, queries = subject.layers, subject.selectors, subject.size.queries
    report.start_model(label, tokens, layers, subject.titles, queries, selectors)
    with layer_progress(f"{label}: captured mass", layers[-1] + 1) as advance:
        prompts = [ids[:tokens] for ids in subject.texts]
        masses = measure_mass(model, prompts, selectors, layers, queries, advance)
    report.add_mass(label, masses)
    with layer_progress(f"{label}: cost", model.layers) as advance:
        ids = subject.texts[0][: tokens + 1]
        report.add_cost(label, measure_cost(model, ids, selectors, layers, advance))


def _agreement(subject: _Subject, report: Report) -> None:
    from sglang_smartgen.calibrate.progress import layer_progress
    from sglang_smartgen.report.agreement import measure_agreement

    model, new = subject.model, subject.size.new_tokens
    with layer_progress(f"{subject.label}: agreement", model.layers) as advance:
        agreement = measure_agreement(
            model, subject.texts, subject.selectors, subject.layers, new, advance
        )
    report.add_agreement(subject.label, agreement, new)


def _folder(name: str) -> Path:
    if name == "smollm2":
        return ensure_model()
    return ensure_gemma3() if name == "gemma3" else Path(name)


def sequences_of(
    model: LayeredModel, tokens: int, size: Size
) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Return the calibration sequences, and `tokens` and the new tokens of each held-out text."""
    from sglang_smartgen.calibrate.texts import load_tokenizer, start_ids, token_sequences
    from sglang_smartgen.report.select_texts import calibration_texts, held_out_texts

    positions = int(model.config.max_position_embeddings)
    whole = tokens + size.new_tokens
    if whole > positions:
        raise ConfigError(
            f"--tokens is {tokens}; the model's {positions} positions allow at most "
            f"{positions - size.new_tokens}"
        )
    tokenizer: Any = load_tokenizer(model.folder)
    begin = start_ids(tokenizer, model.config.model_type)
    length = min(tokens, CALIBRATION_TOKENS)
    calibration = token_sequences(
        calibration_texts(),
        tokenizer,
        begin,
        length=length,
        total=CALIBRATION_SEQUENCES * length,
    )
    held_out: dict[str, list[int]] = {}
    for title, text in list(held_out_texts().items())[: size.texts]:
        ids = begin + list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) < whole:
            raise ConfigError(
                f"--tokens is {tokens}; the held-out text {title} has only {len(ids)} tokens"
            )
        held_out[title] = ids[:whole]
    return calibration, held_out
