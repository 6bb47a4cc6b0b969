"""The tables of docs/ that come from the code, and how they are put between their marks."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from docs_pictures import numbered
from docs_states import Edges, decode_edges, prefill_edges

from sglang_smartgen.config import PER_REQUEST, SmartGenConfig
from sglang_smartgen.report.bench import BENCHMARKS
from sglang_smartgen.transfer import messages

P_ALONE = {"store_gb", "store_server", "profile"}
D_ALONE = {*PER_REQUEST, "blocks_per_layer", "min_prompt_len"}
"""Where a key is read; all others on both."""


def tables() -> dict[str, str]:
    """Mark -> table, as Markdown without the marks."""
    return {
        "config-keys": config_keys(),
        "messages": message_table(),
        "prefill-states": state_table(prefill_edges()),
        "decode-states": state_table(decode_edges()),
        "benchmarks": bench_table(),
    }


def put(text: str, found: dict[str, str]) -> str:
    """The page with every table between its marks replaced; marks of other names are an error."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{found[match[2]]}\n\n{match[3]}"

    return re.sub(
        r"(<!-- from the code: ([\w-]+) -->)\n.*?(<!-- end -->)", table, text, flags=re.DOTALL
    )


def config_keys() -> str:
    """Every key with default, what is allowed, where it is read, and its sentence in config.py."""
    said = meanings()
    hints = get_type_hints(SmartGenConfig)
    lines = [
        "| key | default | allowed | read on | one request | effect |",
        "|---|---|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(SmartGenConfig):
        default = _default(field)
        own = "yes" if field.name in PER_REQUEST else ""
        lines.append(
            f"| `{field.name}` | {default} | {_allowed(hints[field.name])} | "
            f"{_side(field.name)} | {own} | {_cell(said[field.name])} |"
        )
    return "\n".join(lines)


def meanings() -> dict[str, str]:
    """Key -> its sentences in the docstring of SmartGenConfig."""
    text = inspect.getdoc(SmartGenConfig) or ""
    text = text.split("----------\n", 1)[1]
    return {
        match[1]: " ".join(match[2].split())
        for match in re.finditer(r"^(\w+): (.*?)(?=^\w+: |\Z)", text, re.DOTALL | re.MULTILINE)
    }


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    if field.default in (None, ""):
        return "none"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _allowed(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    if hint in names:
        return names[hint]
    kinds = {dict: "object", list: "list", types.UnionType: "whole number or none"}
    return kinds[get_origin(hint)]


def _side(key: str) -> str:
    return "P" if key in P_ALONE else "D" if key in D_ALONE else "P and D"


def _cell(text: str) -> str:
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text.replace("|", "\\|"))


def message_table() -> str:
    """Every control message: who sends it, what for, and its fields."""
    lines = ["| message | what | fields |", "|---|---|---|"]
    for kind in get_args(messages.Message):
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        lines.append(f"| `{kind.__name__}` | {_cell(' '.join(first.split()))} | {fields} |")
    return "\n".join(lines)


def state_table(edges: Edges) -> str:
    """The transitions of a room, with the numbers of its picture."""
    lines = ["| | from | to | when |", "|---|---|---|---|"]
    for number, ((start, end), events) in enumerate(numbered(edges), 1):
        lines.append(f"| {number} | {start} | {end} | {'; '.join(events)} |")
    return "\n".join(lines)


def bench_table() -> str:
    """Every benchmark with its line of help."""
    lines = ["| command | what it measures |", "|---|---|"]
    for name, command in sorted(BENCHMARKS.items()):
        lines.append(f"| [`smartgen bench {name}`](#{name}) | {_cell(command.help)} |")
    return "\n".join(lines)
