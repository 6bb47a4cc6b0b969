"""What SGLang's classes ask our sides for exists: no unit test can build a KV manager to see it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from decode_bench import Bench as DecodeBench
from prefill_bench import Bench as PrefillBench

import sglang_smartgen.engine

ENGINE = Path(sglang_smartgen.engine.__file__).parent
FILES = ("manager", "sender", "receiver", "scheduler_hooks", "layer_hook", "attention")


def asked(owner: str) -> set[str]:
    """Names `x` of every `<...>.<owner>.x` and `<owner>.x` in the files that import SGLang."""
    names = set()
    for file in FILES:
        for node in ast.walk(ast.parse((ENGINE / f"{file}.py").read_text())):
            if isinstance(node, ast.Attribute):
                of = node.value
                last = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
                if last == owner:
                    names.add(node.attr)
    return names


def test_prefill_side_has_what_is_asked_of_it() -> None:
    side = PrefillBench().side
    names = asked("prefill")
    assert {"begin", "finish", "announce", "peer"} <= names
    assert [name for name in sorted(names) if not hasattr(side, name)] == []


def test_decode_side_has_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = DecodeBench(monkeypatch).side
    names = asked("decode")
    assert {"open", "commit", "release"} <= names
    assert [name for name in sorted(names) if not hasattr(side, name)] == []
