"""`smartgen calibrate MODEL TEXT... --selector NAME --out FILE`: makes a selector's artifact.

Started again after Ctrl-C or a kill, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import msgspec
from rich.console import Console

from sglang_smartgen.calibrate import texts
from sglang_smartgen.calibrate.artifacts import Made, check_request, make_artifact
from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.output import result_stream


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen calibrate`."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="model folder (Hugging Face)")
    parser.add_argument("text", metavar="TEXT", type=Path, nargs="*", help="UTF-8 text files")
    parser.add_argument("--selector", required=True, help="what to calibrate: infinigen, hata")
    parser.add_argument("--out", required=True, type=Path, help="the artifact's file")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the selector's calibration, such as bits=128; may be repeated",
    )
    parser.add_argument(
        "--sequence-tokens",
        type=int,
        default=3072,
        help="texts are cut to sequences of this length (%(default)s)",
    )
    parser.add_argument(
        "--total-tokens",
        type=int,
        default=12288,
        help="tokens of all sequences together, from every text in turn (%(default)s)",
    )
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Make the artifact; 0 when it is written. Raises CalibrationError, one sentence."""
    with result_stream(args.format) as out:
        made = _run(args)
        report = msgspec.to_builtins(made) | {"peak_rss_mb": peak_rss_mb()}
        if args.format == "json":
            print(json.dumps(report), file=out, flush=True)
        else:
            Console().print(summary(made), markup=False, highlight=False, soft_wrap=True)
    return 0


def summary(made: Made) -> str:
    """Return the result in two sentences."""
    resumed = f" (layers 0 to {made.resumed_layers - 1} by an earlier run)"
    return (
        f"{made.out}: {made.selector} for {made.model}, {len(made.layers)} layers from "
        f"{made.sequences} sequences of {made.tokens:,} tokens in all.\n"
        f"It took {made.seconds:.0f} s{resumed if made.resumed_layers else ''} "
        f"and {peak_rss_mb():,.0f} MB of memory at most."
    )


def peak_rss_mb() -> float:
    """Return the most memory that this process has held, in MB (10**6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def parse_options(given: list[str]) -> dict[str, object]:
    """Parse `NAME=VALUE` pairs; a value is JSON where it can be read so, else text.

    Raises CalibrationError for an item without a name.
    """
    out: dict[str, object] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise CalibrationError(f"--option is {item!r}; allowed is NAME=VALUE")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def _run(args: argparse.Namespace) -> Made:
    options = parse_options(args.option)
    check_request(args.selector, options)
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise CalibrationError(f"--out is {args.out}; allowed is a file in a folder that exists")
    contents = {str(path): texts.read_text(path) for path in args.text}
    model = LayeredModel(args.model)
    limit = int(model.config.max_position_embeddings)
    if args.sequence_tokens > limit:
        raise CalibrationError(
            f"--sequence-tokens is {args.sequence_tokens}; the model has {limit} positions"
        )
    tokenizer = texts.load_tokenizer(args.model)
    sequences = texts.token_sequences(
        contents,
        tokenizer,
        texts.start_ids(tokenizer, model.config.model_type),
        length=args.sequence_tokens,
        total=args.total_tokens,
    )
    return make_artifact(model, sequences, args.selector, args.out, options)
