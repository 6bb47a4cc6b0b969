"""`smartgen COMMAND`: the table of subcommands; each is a module that is imported when it is used.

A command's module has `add_arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from typing import Any, NamedTuple


class Command(NamedTuple):
    """Where a subcommand lives, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "doctor": Command(
        "sglang_smartgen.report.doctor",
        "check this machine, the packages and your files, and say how to mend what is wrong",
    ),
    "demo": Command(
        "sglang_smartgen.report.demo",
        "start prefill and decode on this machine and compare SmartGen with stock SGLang",
    ),
    "calibrate": Command(
        "sglang_smartgen.calibrate.run",
        "make a selector's artifact from a model and text, once per model",
    ),
    "profile": Command(
        "sglang_smartgen.report.profile",
        "record what requests select and how long they prefill, once per model and selector",
    ),
    "eval": Command(
        "sglang_smartgen.report.eval",
        "LongBench with and without SmartGen: scores, agreement with stock, likelihoods",
    ),
    "bench": Command(
        "sglang_smartgen.report.bench",
        "measure one part of SmartGen on this machine, two arms side by side",
    ),
    "plot": Command(
        "sglang_smartgen.report.plot",
        "draw the figures of what `smartgen bench` has measured",
    ),
    "patch": Command(
        "sglang_smartgen.patching.command",
        "put SmartGen's changes into an installed SGLang, or take them out again",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; 2 and one sentence on stderr for a user error, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    parser, modules = _parser(argv)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(modules[args.command].run(args))
    except KeyboardInterrupt:
        print("smartgen: interrupted; everything it started has ended", file=sys.stderr)
        return 130
    except _user_errors() as error:
        print(f"smartgen {args.command}: {error}", file=sys.stderr)
        return 2


def _parser(argv: list[str]) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="smartgen",
        description="SmartGen for SGLang: start decoding before all KV has arrived.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        if name in argv:
            modules[name] = importlib.import_module(command.module)
            modules[name].add_arguments(subparser)
    return parser, modules


def _user_errors() -> tuple[type[Exception], ...]:
    """What a user can put right; the text is one sentence. Imported only when a command failed."""
    from sglang_smartgen.calibrate.errors import CalibrationError
    from sglang_smartgen.config import ConfigError
    from sglang_smartgen.report.client import RequestError
    from sglang_smartgen.report.cluster import ClusterError
    from sglang_smartgen.report.model_cache import ModelCacheError

    return CalibrationError, ConfigError, ClusterError, ModelCacheError, RequestError


def _terminate(number: int, frame: object) -> None:
    """SIGTERM ends the command as an exception would, so that its servers are stopped."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
