"""Parts of `smartgen demo` that need no server: prompts, modes, byte counts, what is shown."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.demo import kv_token_bytes, parse_modes
from sglang_smartgen.report.demo_view import JsonView, table
from sglang_smartgen.report.prompts import QUESTION, demo_text, question_prompt, text_prompt

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
}


class CharTokenizer:
    """One token a character; a chat template like ChatML's when asked for."""

    bos_token = "^"

    def __init__(self, chat: bool) -> None:
        self.chat_template = "chat" if chat else None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(char) for char in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **named: object) -> str:
        return f"<user>{messages[0]['content']}<end><assistant>"


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("tokens", [60, 300, 20000])
def test_a_question_prompt_has_exactly_its_length(chat: bool, tokens: int) -> None:
    text = demo_text()
    prompt = decode(question_prompt(CharTokenizer(chat), text, "Who?", tokens))
    assert len(prompt) == tokens
    head, tail = ("<user>", "\n\nWho?<end><assistant>") if chat else ("^", "\n\nWho?\n")
    assert prompt.startswith(head + text[:20]) and prompt.endswith(tail)
    body = prompt.removeprefix(head).removesuffix(tail)
    assert body == (text * 3)[: len(body)]


def test_a_prompt_too_short_for_its_question_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt tokens are 5; the question alone needs 31"):
        question_prompt(CharTokenizer(True), "text", "Who?..", 5)
    assert len(question_prompt(CharTokenizer(True), "text", "Who?..", 31)) == 31


def test_text_prompts_are_cut_where_told() -> None:
    assert decode(text_prompt(CharTokenizer(False), "abcdef", 3, start=2)) == "cde"
    with pytest.raises(ValueError, match="the text has 2"):
        text_prompt(CharTokenizer(False), "abcdef", 3, start=4)


def test_the_text_answers_the_question() -> None:
    assert "seal" in demo_text() and "knocking" in demo_text() and "Hester Quill" in QUESTION
    assert 8000 < len(demo_text()) < 11000


def test_stock_comes_last_and_the_rest_keeps_its_order() -> None:
    assert parse_modes("stock,full, smartgen") == ["full", "smartgen", "stock"]


@pytest.mark.parametrize("text", ["", ",", "full,full", "smartgen,dense"])
def test_bad_modes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--modes") as refusal:
        parse_modes(text)
    assert "proactive_only" in str(refusal.value)


def test_kv_bytes_of_a_token() -> None:
    assert kv_token_bytes(SMOLLM2) == 46080  # reference: SmolLM2-135M in float32
    bare = {key: SMOLLM2[key] for key in SMOLLM2 if key not in ("head_dim", "num_key_value_heads")}
    assert kv_token_bytes(bare) == 2 * 30 * 576 * 4


def report() -> dict[str, Any]:
    row = {
        "ttft_s": 2.0,
        "ttst_s": 2.25,
        "tbt_s": None,
        "bytes_proactive": 92_160_000,
        "bytes_metadata": 1_500_000,
        "bytes_on_demand": 0,
        "bytes_speculative": 0,
        "local_share_at_start": 0.25,
    }
    modes = {"smartgen": row, "stock": row | {"local_share_at_start": 1.0}}
    return {
        "model": "m",
        "prompt_tokens": 2000,
        "answer": dict.fromkeys(modes, "a"),
        "modes": modes,
    }


def test_only_computed_cells_are_starred() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(report()))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    smartgen = next(line for line in lines if "smartgen" in line)
    stock = next(line for line in lines if "stock" in line)
    assert "2,000 prompt tokens" in lines[0]
    for cell in ("2.00", "2.25", "92.2", "1.5", "25%", "-"):
        assert cell in smartgen
    assert "*" not in smartgen
    assert "92.2*" in stock and "100%*" in stock


def test_json_is_the_only_line_on_stdout() -> None:
    out = io.StringIO()
    view = JsonView(out)
    view.question("Who?", 2000)
    with view.working("something"), view.answering("full") as on_text:
        on_text("an answer")
    with view.starting("stock SGLang") as progress:
        progress(1.0, {"prefill": False, "decode": True})
    assert out.getvalue() == ""
    view.report(report())
    assert json.loads(out.getvalue()) == report()
    assert out.getvalue().count("\n") == 1
