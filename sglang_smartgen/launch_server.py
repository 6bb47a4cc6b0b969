"""`python -m sglang_smartgen.launch_server`: SGLang's launcher with two more flags.

--enable-smartgen                switch SmartGen on, with the default configuration
--smartgen-config JSON|FILE      switch it on with this configuration

All other flags are SGLang's. Without either of ours (and without SGLANG_SMARTGEN_CONFIG in the
environment) stock SGLang runs; on a host without a GPU both get what SGLang needs there
(`engine.cpu_host`).

Spawned processes import this file as `__mp_main__`: nothing may run at import.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

ENABLE_FLAG = "--enable-smartgen"
CONFIG_FLAG = "--smartgen-config"
CONFIG_ENV = "SGLANG_SMARTGEN_CONFIG"  # as in config.py, which is imported only where it is needed


class ArgumentError(ValueError):
    """A wrong flag of ours; its text is one sentence for the user."""


class Arguments(NamedTuple):
    """The command line taken apart: `sglang` is left for SGLang, in order."""

    sglang: list[str]
    enabled: bool
    config: str | None


def split_arguments(argv: list[str]) -> Arguments:
    """Take our two flags out of `argv`; the last `--smartgen-config` wins, as in argparse.

    Raises ArgumentError when a flag has no value, or one that it does not take.
    """
    sglang: list[str] = []
    enabled, config = False, None
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name == ENABLE_FLAG:
            if equals:
                raise ArgumentError(f"{ENABLE_FLAG} takes no value, but '{text}' was given")
            enabled = True
        elif name == CONFIG_FLAG:
            config = text if equals else next(words, "")
            if not config.strip() or config.startswith("--"):
                raise ArgumentError(f"{CONFIG_FLAG} needs a JSON text or the name of a JSON file")
            enabled = True
        else:
            sglang.append(word)
    return Arguments(sglang, enabled, config)


def export_config(source: str | None) -> None:
    """Check the configuration and hand it to all processes of this server through the environment.

    Raises ValueError with one sentence when the configuration cannot be used. Without `source`, one
    that is in the environment already is kept, else the defaults hold.
    """
    import msgspec

    from sglang_smartgen.config import load_config

    config = load_config(source or os.environ.get(CONFIG_ENV, "").strip() or "{}")
    os.environ[CONFIG_ENV] = msgspec.json.encode(config).decode()


def run_sglang(argv: list[str]) -> None:
    """What `python -m sglang.launch_server` does, in this process."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if os.environ.get(CONFIG_ENV, "").strip():
        _require_plugin()
    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _require_plugin() -> None:
    """SGLang may have been told to load other plugins only; then it would serve stock."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_smartgen.engine.native import NO_PLUGIN
    from sglang_smartgen.engine.refusals import BACKEND

    if BACKEND not in ATTENTION_BACKENDS:
        print(f"SmartGen: {NO_PLUGIN}", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run a server until it ends; 2 and one sentence on stderr for a wrong flag of ours."""
    try:
        arguments = split_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.enabled or os.environ.get(CONFIG_ENV, "").strip():
            export_config(arguments.config)
            # Mooncake writes a line a transfer: hundreds a second where entries are fetched.
            os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    except ValueError as error:
        print(f"sglang_smartgen.launch_server: {error}", file=sys.stderr)
        return 2

    from sglang_smartgen.engine import cpu_host

    run_sglang(cpu_host.prepare_environment(arguments.sglang))
    return 0


if __name__ == "__main__":
    sys.exit(main())
