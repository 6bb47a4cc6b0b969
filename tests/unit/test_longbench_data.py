"""Loader, prompts and truncation of `smartgen eval`, and the small set that ships."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longbench_world import WordTokenizer, item, line

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench.data import DataError, load, load_task
from sglang_smartgen.report.longbench.framing import REFERENCE_TOKENS, Framer, truncate_middle
from sglang_smartgen.report.longbench.tasks import task_of, tasks

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "tests" / "data" / "longbench"


def write(folder: Path, task: str, *lines: str | bytes | dict[str, Any]) -> Path:
    file = folder / f"{task}.jsonl"
    whole = [x if isinstance(x, str | bytes) else json.dumps(x) for x in lines]
    file.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in whole))
    return file


# Loader ---------------------------------------------------------------------------------------


def test_items_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "trec", line("trec", all_classes=["A", "B"], answers=["A", "B"]))
    write(tmp_path, "multifieldqa_en_e", line(context="a\u2028b"), line(_id="y"))
    write(tmp_path, "other", "not a task")
    by_name = {task.name: task for task in load(str(tmp_path), None)}
    assert list(by_name) == ["multifieldqa_en_e", "trec"]  # LongBench's order
    first, second = by_name["multifieldqa_en_e"].items
    assert (first.line, first.context, first.task) == (1, "a\u2028b", "multifieldqa_en_e")
    assert (second.line, second.id) == (2, "y")
    assert by_name["trec"].items[0].classes == ("A", "B")
    assert [task.name for task in load(str(tmp_path), ["trec"])] == ["trec"]


def without(name: str) -> dict[str, Any]:
    value = line()
    del value[name]
    return value


@pytest.mark.parametrize(
    ("task", "bad", "message"),
    [
        ("multifieldqa_en", "{", r"not a JSON object \(Expecting property name"),
        ("multifieldqa_en", "", r"not a JSON object \(Expecting value\)"),
        ("multifieldqa_en", "[1]", "not a JSON object but a list"),
        ("multifieldqa_en", b'{"input": "\xff"}', r"not a JSON object \(it is not UTF-8\)"),
        ("multifieldqa_en", without("answers"), "field 'answers' is missing"),
        ("multifieldqa_en", without("_id"), "field '_id' is missing"),
        ("multifieldqa_en", line(context=7), "'context' is a number; expected is a text"),
        ("multifieldqa_en", line(answers="Ann"), "'answers' is a text; expected is a list"),
        ("multifieldqa_en", line(answers=["Ann", None]), "'answers' has an entry that is no text"),
        ("multifieldqa_en", line(answers=[]), "'answers' is empty"),
        ("multifieldqa_en", line(length=True), "'length' is true or false; expected is a number"),
        ("multifieldqa_en", line("trec"), "'dataset' is 'trec'; the file is multifieldqa_en.jsonl"),
        ("trec", line("trec"), "'all_classes' is empty"),
        ("passage_retrieval_en", line("passage_retrieval_en"), "answer is 'Ann'; the task needs"),
    ],
)
def test_malformed_lines_are_named(
    task: str, bad: str | bytes | dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = line(task, all_classes=["A"], answers=["Paragraph 1"])
    file = write(tmp_path, task, good, bad, good)
    with pytest.raises(DataError, match=message) as caught:
        load_task(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert "\n" not in str(caught.value)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"--data is {tmp_path}/none; allowed is a folder"):
        load(f"{tmp_path}/none", None)
    with pytest.raises(DataError, match=f"{tmp_path} has no file TASK.jsonl"):
        load(str(tmp_path), None)
    with pytest.raises(DataError, match=r"trec\.jsonl: No such file"):
        load(str(tmp_path), ["trec"])
    with pytest.raises(DataError, match=r"trec\.jsonl:1: the file is empty"):
        load_task(write(tmp_path, "trec"))
    with pytest.raises(ConfigError, match="task is 'nope'"):
        load(str(tmp_path), ["nope"])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
    """Puts a function in place of the hub's download."""
    monkeypatch.setenv("SMARTGEN_CACHE", str(tmp_path / "cache"))

    def place(download: Callable[..., str]) -> None:
        module = type(sys)("huggingface_hub")
        module.hf_hub_download = download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    return place


def test_the_hub_is_asked_once(tmp_path: Path, hub: Callable[..., None]) -> None:
    asked: list[tuple[str, str, str]] = []

    def download(repository: str, file: str, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        archive = tmp_path / file
        with zipfile.ZipFile(archive, "w") as target:
            target.writestr("data/multifieldqa_en.jsonl", json.dumps(line()) + "\n")
        return str(archive)

    hub(download)
    for _ in range(2):
        (task,) = load("hub", None)
        assert len(task.items) == 1
    assert asked == [("THUDM/LongBench", "data.zip", "dataset")]


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    tmp_path: Path, hub: Callable[..., None]
) -> None:
    def download(*args: str, **kwargs: str) -> str:
        raise ConnectionError("no\nnetwork")

    hub(download)
    with pytest.raises(DataError, match=r"cannot be fetched from the hub \(no network\); unpack"):
        load("hub", None)
    broken = tmp_path / "data.zip"
    broken.write_bytes(b"PK")
    hub(lambda *args, **kwargs: str(broken))
    with pytest.raises(DataError, match="cannot be unpacked"):
        load("hub", None)
    assert not (tmp_path / "cache" / "longbench").exists()


# Prompts --------------------------------------------------------------------------------------


def test_truncation_keeps_both_ends() -> None:
    tokenizer = WordTokenizer()
    text = "one two three four five six seven"
    assert truncate_middle(tokenizer, text, 7) == text
    assert truncate_middle(tokenizer, text, 5) == "one two six seven"
    assert truncate_middle(tokenizer, text, 4) == "one two six seven"
    assert truncate_middle(tokenizer, text, 2) == "one seven"


FACTS = {"max_position_embeddings": 200, "model_type": "llama"}


def test_a_prompt_has_longbench_s_words_and_the_chat_frame() -> None:
    tokenizer = WordTokenizer(chat_template="a template", adds_bos=True)
    prompt = Framer(tokenizer, FACTS).prompt(item())
    asked = task_of("multifieldqa_en").prompt.format(context="It was Ann.", input="Who?")
    assert tokenizer.decode(prompt.ids) == f"<user>{asked}<model>"
    assert asked.startswith("Read the following text and answer briefly.\n\nIt was Ann.\n\nNow,")
    assert tokenizer.decode(prompt.reference) == "Ann"
    assert not prompt.truncated


def test_few_shot_tasks_are_not_framed() -> None:
    tokenizer = WordTokenizer(chat_template="a template", adds_bos=True)
    few_shot = item(task="trec", input="Question: Who?\nType:", answers=("Name",))
    prompt = Framer(tokenizer, FACTS).prompt(few_shot)
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("<s>Please determine") and text.endswith("Ann.\nQuestion: Who?\nType:")
    assert tokenizer.decode(prompt.reference) == " Name"  # as it would go on


def test_gemma_gets_a_bos_and_only_one() -> None:
    gemma = {"text_config": {"max_position_embeddings": 200, "model_type": "gemma3_text"}}
    for adds_bos in (False, True):
        ids = Framer(WordTokenizer(adds_bos=adds_bos), gemma).prompt(item()).ids
        assert ids[0] == 0 and ids.count(0) == 1
    assert 0 not in Framer(WordTokenizer(), FACTS).prompt(item()).ids


@pytest.mark.parametrize("chat_template", [None, "a template"])
@pytest.mark.parametrize("words", [98, 105, 150, 1000])
def test_a_long_prompt_loses_its_middle_and_fits(chat_template: str | None, words: int) -> None:
    tokenizer = WordTokenizer(chat_template=chat_template)
    context = " ".join(f"w{n}" for n in range(words))
    framer = Framer(tokenizer, FACTS)
    room = 200 - REFERENCE_TOKENS  # the answer has 64 tokens, too
    assert framer.room(task_of("multifieldqa_en")) == room
    prompt = framer.prompt(item(context=context))
    text = tokenizer.decode(prompt.ids)
    assert prompt.truncated == (words > 100)  # without a cut: 35 tokens around, 2 of the frame
    assert room - 3 <= len(prompt.ids) <= room if prompt.truncated else len(prompt.ids) <= room
    assert "Read the following" in text and "Question: Who?\nAnswer:" in text and "w0 w1" in text
    assert f"w{words - 1}\n\nNow," in text


def test_limits_of_the_user_and_of_the_model() -> None:
    framer = Framer(WordTokenizer(), FACTS, max_prompt_tokens=60, max_new_tokens=8)
    assert framer.new_tokens(task_of("gov_report")) == 8
    assert len(framer.prompt(item(context="w " * 100)).ids) <= 60
    assert Framer(WordTokenizer(), FACTS, max_new_tokens=100).new_tokens(task_of("trec")) == 64
    with pytest.raises(ConfigError, match=r"512 new tokens leave no room .* the 200 positions"):
        Framer(WordTokenizer(), FACTS).prompt(item(task="gov_report"))
    tight = Framer(WordTokenizer(chat_template="t"), FACTS, max_prompt_tokens=2)
    with pytest.raises(ConfigError, match="a prompt of 2 tokens has no room for the chat template"):
        tight.prompt(item())


# The set that ships -----------------------------------------------------------------------------


def test_the_shipped_set_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make", ROOT / "scripts/make_longbench_set.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    sys.modules["make"] = make  # dataclasses look their module up
    try:
        spec.loader.exec_module(make)
        for task in ("trec", "gov_report"):
            written = (SHIPPED / f"{task}.jsonl").read_bytes()
            assert "".join(make.lines_of(task)).encode() == written
    finally:
        del sys.modules["make"]


def test_the_shipped_set_can_be_answered_from_its_texts() -> None:
    data = {task.name: task.items for task in load(str(SHIPPED), None)}
    assert list(data) == ["multifieldqa_en", "gov_report", "trec", "passage_retrieval_en"]
    assert set(data) < set(tasks()) and sum(map(len, data.values())) == 60
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1_000_000
    for one in data["multifieldqa_en"]:
        assert one.answers[0] in one.context
    for one in data["trec"]:
        assert one.answers[0] in one.classes
    for one in data["passage_retrieval_en"]:
        assert f"\n{one.answers[0]}: " in f"\n{one.context}" and "Paragraph 31" not in one.context
