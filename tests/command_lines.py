"""Are the flags of a written command line real ones? Used by the tests of docs/ and deploy/.

Commands of SmartGen and of the router meet their own parsers. SGLang's parser takes ten seconds to
import, so its flags are read from the fields that it is made from.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from sglang_smartgen import cli
from sglang_smartgen.config import SmartGenConfig, load_config
from sglang_smartgen.launch_server import split_arguments

ROOT = Path(__file__).parents[1]
TYPES = {"int": int, "float": float}


class WrongCommand(AssertionError):
    """A command line that its program would refuse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise WrongCommand(message)


def _flags_of(field: ast.AnnAssign) -> tuple[list[str], dict[str, object]] | None:
    """The flag names of one `name: A[type, ...]`, and how argparse is to read them."""
    if not isinstance(field.annotation, ast.Subscript) or not isinstance(field.target, ast.Name):
        return None
    if not isinstance(field.annotation.slice, ast.Tuple):
        return None
    kind, meta = field.annotation.slice.elts[:2]
    names = ["--" + field.target.id.replace("_", "-")]
    if isinstance(meta, ast.Call):
        given = {word.arg: word.value for word in meta.keywords}
        if "no_cli" in given:
            return None
        if "cli_name" in given:
            names = [ast.literal_eval(given["cli_name"])]
        if "aliases" in given:
            names += ast.literal_eval(given["aliases"])
    text = ast.unparse(kind)
    if text == "bool":
        return names, {"action": "store_true"}
    how: dict[str, object] = {"type": TYPES.get(text.removeprefix("Optional[").rstrip("]"), str)}
    if text.startswith("Literal["):
        how["choices"] = ast.literal_eval(f"({text[8:-1]},)")
    if "List[" in text:
        how["nargs"] = "+"
    return names, how


@cache
def sglang_parser() -> argparse.ArgumentParser:
    """A parser with the flags of the installed SGLang's server."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    parser = _Parser(prog="sglang", allow_abbrev=False)
    for file in sorted((Path(spec.origin).parent / "srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and (found := _flags_of(node)):
                parser.add_argument(*found[0], **found[1])  # type: ignore[arg-type]
    return parser


def check_server(words: list[str], configs: dict[str, Path]) -> tuple[argparse.Namespace, Any]:
    """Arguments of `launch_server`, parsed; configs: what a path in them stands for."""
    arguments = split_arguments(words)
    config: SmartGenConfig | None = None
    if arguments.enabled:
        source = arguments.config or "{}"
        config = load_config(str(configs.get(source, source)))
    args = sglang_parser().parse_args(arguments.sglang)
    assert args.disaggregation_mode in ("prefill", "decode"), words
    assert args.disaggregation_transfer_backend == "mooncake" and args.model_path, words
    return args, config


def check_router(words: list[str]) -> Any:
    """Arguments of SGLang's router, parsed by itself (its launcher would import all of SGLang)."""
    from sglang_router.router_args import RouterArgs

    parser = _Parser(prog="sglang_router.launch_router")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return RouterArgs.from_cli_args(parser.parse_args(words), use_router_prefix=False)


def check_smartgen(words: list[str]) -> argparse.Namespace:
    """Arguments of `smartgen`, parsed by its own parser; a configuration in them is read too."""
    parser, _ = cli._parser(words)
    args = argparse.Namespace()  # after --help
    with _argparse_errors():
        args = parser.parse_args(words)
    for name in ("config", "smartgen_config"):
        if (text := getattr(args, name, None)) and isinstance(text, str) and text[0] == "{":
            load_config(text)
    return args


@contextlib.contextmanager
def _argparse_errors():  # type: ignore[no-untyped-def]
    """argparse writes and exits; here it raises."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit as ended:
        if ended.code:
            raise WrongCommand(said.getvalue().splitlines()[-1]) from None


def commands(block: str) -> list[list[str]]:
    """The commands of a shell block as words: lines joined, comments, prompts, settings removed."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        line = line.strip().removeprefix("$ ")
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words:
            found.append(words)
    return found


def script_flags(path: Path) -> set[str]:
    """The flags that a script of ours declares, read from its text."""
    return set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text()))


def check(words: list[str]) -> None:
    """Parse a command of ours with what it calls. Raises AssertionError or ValueError."""
    match words:
        case ["scripts/run.sh", *rest]:
            check(rest)
        case ["scripts/demo.sh", *rest]:
            check_smartgen(["demo", *rest])
        case ["scripts/run_longbench.sh", *rest]:
            check_smartgen(["eval", "--data", "tests/data/longbench", *rest])
        case ["smartgen", *rest]:
            check_smartgen(rest)
        case ["python", "-m", "sglang_smartgen.launch_server", *rest]:
            check_server(rest, {})
        case ["python", "-m", "sglang_router.launch_router", *rest]:
            check_router(rest)
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            for word in rest:
                assert word.startswith("-") or list(ROOT.glob(word.split("::")[0])), word
        case ["python", script, *rest] if script.startswith("scripts/"):
            flags = {word.partition("=")[0] for word in rest if word.startswith("-")}
            assert flags <= script_flags(ROOT / script), f"{script} has no {flags}"
        case [script, *_] if script.startswith("scripts/"):
            assert (ROOT / script).is_file(), script
