"""A run of `smartgen eval`: its folder, killing and resuming it, its requests, its table."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from longbench_world import (
    SPARE,
    FakeAsks,
    WordTokenizer,
    item,
    job,
    line,
    step_logits,
    stub_server,
)
from rich.console import Console

from sglang_smartgen import cli
from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine.forced_tokens import ForcedTokens
from sglang_smartgen.report import eval as command
from sglang_smartgen.report.client import RequestError
from sglang_smartgen.report.longbench import runner, scores
from sglang_smartgen.report.longbench.arms import Arm, groups, parse_arms
from sglang_smartgen.report.longbench.ask import Asker, Job
from sglang_smartgen.report.longbench.data import DataError, TaskFile
from sglang_smartgen.report.longbench.folder import RunFolder
from sglang_smartgen.report.longbench.view import table

STOCK = Arm("stock", None)
OURS = Arm("smartgen", {}, {"mode": "smartgen"})
COLD = Arm("proactive_only", {}, {"mode": "proactive_only"})
ARMS = [OURS, COLD, STOCK]

# Arms -----------------------------------------------------------------------------------------


def test_arms_that_a_request_can_ask_for_share_a_pair() -> None:
    arms = parse_arms(
        "stock,proactive_only,smartgen,full",
        ['k.all={"ratio": 1}', 'exact={"selector": "exact", "ratio": 0.2}'],
        '{"ratio": 0.1, "store_gb": 2}',
        own_pair=True,
    )
    base = {"ratio": 0.1, "store_gb": 2}
    assert arms == [
        Arm("smartgen", base, {"ratio": 0.1, "mode": "smartgen"}),
        Arm("full", base, {"ratio": 0.1, "mode": "full"}),
        Arm("k.all", base, {"ratio": 1, "mode": "smartgen"}),
        # 0.2 is the default, and is asked for all the same
        Arm("exact", {**base, "selector": "exact"}, {"ratio": 0.2, "mode": "smartgen"}),
        Arm("proactive_only", base, {"ratio": 0.1, "mode": "proactive_only"}),
        STOCK,
    ]
    assert [[arm.name for arm in group] for group in groups(arms)] == [
        ["smartgen", "full", "k.all", "proactive_only"],
        ["exact"],
        ["stock"],
    ]
    assert [arm.cold for arm in (OURS, COLD, STOCK)] == [False, True, False]


@pytest.mark.parametrize(
    ("modes", "named", "config", "own_pair", "message"),
    [
        ("fast", [], "{}", True, "--modes is 'fast'; allowed is a list of smartgen, full"),
        ("full,full", [], "{}", True, "--modes is 'full,full'"),
        ("", [], "{}", True, "no arm was given"),
        ("full", ["full={}"], "{}", True, "--arm is 'full={}'; allowed is NAME=JSON"),
        ("full", ["stock={}"], "{}", True, "--arm is 'stock={}'"),
        ("full", ["a b={}"], "{}", True, "--arm is 'a b={}'"),
        ("full", ["a"], "{}", True, "--arm is 'a'"),
        ("full", ['a={"ratio": 7}'], "{}", True, "ratio is 7"),
        ("full", ['a={"rato": 1}'], "{}", True, "unknown key 'rato'"),
        ("full", ['a={"selector": "exact"}'], "{}", False, "arm a sets selector, which the runnin"),
        ("full", [], '{"store_gb": 1}', False, "arm full sets store_gb"),
    ],
)
def test_arms_that_cannot_be_run(
    modes: str, named: list[str], config: str, own_pair: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms(modes, named, config, own_pair=own_pair)
    assert message in str(caught.value)


# Folder and resuming --------------------------------------------------------------------------

JOBS = [job(number, task) for task in ("trec", "multifieldqa_en") for number in (1, 2, 3)]
DATA = [TaskFile(name, "a" * 64, ()) for name in ("trec", "multifieldqa_en")]


def evaluate(
    folder: Path, asks: Any, *, parallel: int = 1, starts: list[str] | None = None
) -> None:
    @contextmanager
    def servers(group: list[Arm]) -> Iterator[Any]:
        if starts is not None:
            starts.append(group[0].name)
        yield asks

    with RunFolder(folder) as opened:
        opened.open({"model": "m"}, ARMS, DATA)
        runner.run(opened, JOBS, ARMS, servers, parallel=parallel)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """predictions.jsonl of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    evaluate(folder, FakeAsks())
    return (folder / "predictions.jsonl").read_bytes()


def test_a_run_has_every_prediction_once(whole: bytes) -> None:
    keys = [(x["arm"], x["task"], x["line"]) for x in map(json.loads, whole.splitlines())]
    assert len(keys) == len(set(keys)) == 18
    assert keys[:3] == [
        ("smartgen", "trec", 1),
        ("proactive_only", "trec", 1),
        ("smartgen", "trec", 2),
    ]
    assert [arm for arm, _, _ in keys[12:]] == ["stock"] * 6


def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(whole: bytes, tmp_path: Path) -> None:
    draw = random.Random(7)
    lines = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    cuts = {0, 1, len(whole), *lines[::5], *(end - 1 for end in lines[::5])}
    cuts |= {draw.randrange(len(whole)) for _ in range(10)}
    for cut in sorted(cuts):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "predictions.jsonl").write_bytes(whole[:cut])
        asks = FakeAsks()
        evaluate(folder, asks)
        assert (folder / "predictions.jsonl").read_bytes() == whole
        predicted = [call for call in asks.calls if "warm" not in call]
        assert len(predicted) == 18 - whole[:cut].count(b"\n")  # nothing is asked twice


class DyingAsks(FakeAsks):
    """Is killed at a prediction."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def predict(self, job: Job, arm: Arm) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(job, arm)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_killed_run_is_resumed_to_the_same_bytes(
    parallel: int, whole: bytes, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    for at in (0, 5, 6):  # each goes on where the one before was killed
        child = context.Process(
            target=evaluate, args=(tmp_path, DyingAsks(at)), kwargs={"parallel": parallel}
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    evaluate(tmp_path, FakeAsks(), parallel=parallel)
    assert (tmp_path / "predictions.jsonl").read_bytes() == whole


def test_a_finished_run_starts_no_servers(tmp_path: Path) -> None:
    starts: list[str] = []
    evaluate(tmp_path, FakeAsks(), starts=starts)
    assert starts == ["smartgen", "stock"]
    evaluate(tmp_path, FakeAsks(), starts=starts)
    assert starts == ["smartgen", "stock"]


def test_a_failure_in_one_of_several_threads_ends_the_run(tmp_path: Path) -> None:
    class Failing(FakeAsks):
        def predict(self, job: Job, arm: Arm) -> dict[str, Any]:
            if job.item.line == 3:
                raise RequestError("no answer")
            return super().predict(job, arm)

    with pytest.raises(RequestError, match="no answer"):
        evaluate(tmp_path, Failing(), parallel=2)
    assert len((tmp_path / "predictions.jsonl").read_bytes().splitlines()) == 4


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    evaluate(tmp_path, FakeAsks())
    with RunFolder(tmp_path) as folder:
        with pytest.raises(ConfigError, match="another run is using it"), RunFolder(tmp_path):
            pass
        with pytest.raises(ConfigError, match=r"whose setting 'model' was \"m\", now it is \"n\""):
            folder.open({"model": "n"}, ARMS, DATA)
        with pytest.raises(ConfigError, match="whose arm 'smartgen' was"):
            folder.open({"model": "m"}, [Arm("smartgen", {}, {"mode": "full"})], DATA)
        with pytest.raises(ConfigError, match="whose task 'trec' was"):
            folder.open({"model": "m"}, ARMS, [TaskFile("trec", "b" * 64, ())])
        folder.open({"model": "m"}, [Arm("full", {}, {"mode": "full"})], [])  # one more is welcome
        assert len(folder.predictions) == 18
    known = json.loads((tmp_path / "config.json").read_text())
    assert list(known["arms"]) == ["smartgen", "proactive_only", "stock", "full"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"--out is .*/file/run: Not a directory"):
        RunFolder(blocked / "run").__enter__()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], b"nonsense\n", lines[1]], ":2: not a JSON object"),
        (lambda lines: [lines[0], b"7\n"], ":2: not a JSON object"),
        (lambda lines: [lines[0], b"{}\n"], ":2: field 'task' is missing"),
        (lambda lines: [lines[0], lines[1], lines[0]], ":3: the same item and arm"),
    ],
)
def test_damage_within_the_file_is_named(
    damage: Any, message: str, whole: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_bytes(b"".join(damage(whole.splitlines(keepends=True))))
    before = file.read_bytes()
    with (
        RunFolder(tmp_path) as folder,
        pytest.raises(DataError, match=f"predictions.jsonl{message}"),
    ):
        folder.open({"model": "m"}, ARMS, DATA)
    assert file.read_bytes() == before


# Requests -------------------------------------------------------------------------------------


def asker(url: str, **settings: Any) -> Asker:
    return Asker(url, **{"newline": 6, "spare": SPARE, "pause_s": 0.0, **settings})


def test_requests_of_one_item() -> None:
    with stub_server() as (url, seen):
        asks, one = asker(url), job(1)
        asks.warm_up(one, [COLD, OURS])
        first = asks.predict(one, OURS)
        asks.predict(one, COLD)
        asks.predict(one, STOCK)
        asks.warm_up(job(2), [OURS])
    other = seen.pop()["extra_key"]
    warm, answer, reference, cold, _, stock, stock_reference = seen
    assert warm["sampling_params"]["max_new_tokens"] == 2
    assert warm["sampling_params"]["custom_params"] == {"smartgen": {"mode": "smartgen"}}
    # One prefill for all but the cold ones.
    keys = [body["extra_key"] for body in seen]
    assert len({warm["extra_key"], *keys[1:3], *keys[5:]}) == 1
    assert len({*keys[2:5], other}) == 4
    assert answer["sampling_params"]["max_new_tokens"] == one.max_new_tokens
    assert reference["sampling_params"]["max_new_tokens"] == 3
    assert (
        reference["sampling_params"]["ignore_eos"] and not answer["sampling_params"]["ignore_eos"]
    )
    assert cold["sampling_params"]["custom_params"]["smartgen"] == {"mode": "proactive_only"}
    assert "custom_params" not in stock["sampling_params"]
    assert stock_reference["sampling_params"]["custom_params"] == {
        "forced": [5, 3, 9],
        "spare": SPARE,
    }
    assert first["pred"] == "Ann" and len(first["tokens"]) == 4
    assert first["answers"] == ["Ann"] and first["prompt_tokens"] == 3


def test_the_likelihood_is_the_model_s_own() -> None:
    one = job(2)
    with stub_server() as (url, _):
        found = asker(url).predict(one, OURS)
    own = [torch.log_softmax(step_logits(one.prompt.ids, step)[0], dim=-1) for step in (1, 2)]
    expected = [own[0][3].item(), own[1][9].item()]  # the first token is the prefill's
    assert found["reference_logprobs"] == pytest.approx(expected, abs=2e-3)
    assert found["reference_preferred"] == [int(step.argmax()) for step in own]


def test_a_reference_of_one_token_has_no_decode_step() -> None:
    with stub_server() as (url, seen):
        assert asker(url).predict(job(reference=1), OURS)["reference_logprobs"] == []
        assert asker(url, spare=None).predict(job(), OURS)["reference_logprobs"] is None
    assert len(seen) == 2


def test_servers_that_do_not_force_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForcedTokens, "__call__", lambda self, logits, params: logits)
    with stub_server() as (url, _), pytest.raises(RequestError, match="teacher-forced"):
        asker(url).predict(job(), OURS)


def test_one_line_answers_stop_at_the_line_s_end() -> None:
    with stub_server() as (url, seen):
        asks = asker(url, spare=None)
        asks.predict(job(task="samsum"), OURS)
        asks.predict(job(task="trec"), OURS)
    assert seen[0]["sampling_params"]["stop_token_ids"] == [6]
    assert seen[0]["sampling_params"]["min_new_tokens"] == 1
    assert "stop_token_ids" not in seen[1]["sampling_params"]


def test_a_failed_request_is_tried_again_and_then_named() -> None:
    with stub_server(failures=2) as (url, seen):
        assert asker(url, spare=None).predict(job(), OURS)["pred"] == "Ann"
        assert len(seen) == 3
    with stub_server(failures=3) as (url, seen), pytest.raises(RequestError) as caught:
        asker(url).predict(job(2, "trec"), OURS)
    assert "trec line 2 in arm smartgen failed 3 times, at last with: HTTP status 503: busy" in str(
        caught.value
    )

    def ended() -> None:
        raise RequestError("the decode server ended")

    with stub_server(failures=1) as (url, seen), pytest.raises(RequestError, match="server ended"):
        asker(url, check=ended).predict(job(), OURS)


# Scores and table -----------------------------------------------------------------------------


def prediction(
    pred: str,
    tokens: list[int],
    logs: list[float] | None = None,
    preferred: list[int] | None = None,
) -> dict[str, Any]:
    return {
        "pred": pred,
        "tokens": tokens,
        "reference_logprobs": logs,
        "reference_preferred": preferred,
    }


def test_scores_agreement_and_likelihood_by_hand() -> None:
    items = {
        "multifieldqa_en_e": [item(1, length=10), item(2, length=4000)],
        "passage_retrieval_en": [item(1, "passage_retrieval_en", answers=("Paragraph 3",))],
    }
    qa, find = items
    predictions = {
        (qa, 1, "stock"): prediction("Ann", [1, 2], [-1.0, -2.0], [5, 6]),
        (qa, 2, "stock"): prediction("Ann", [1, 2, 3, 4], [], []),
        (find, 1, "stock"): prediction("3", [7], [-0.5], [4]),
        (qa, 1, "smartgen"): prediction("Ann", [1, 2], [-2.0, -4.0], [5, 7]),
        (qa, 2, "smartgen"): prediction("Bob", [1, 9], [], []),
        (find, 1, "smartgen"): prediction("3 or 4", [7, 8], [-1.0], [4]),
    }
    report = scores.summary(predictions, items, ["smartgen", "stock"])
    ours, stock = report["arms"]["smartgen"], report["arms"]["stock"]
    assert report["items"] == {qa: 2, find: 1}
    assert ours["tasks"][qa] == {
        "score": 50.0,
        "relative": 0.5,
        "same_answer": 0.5,
        "common_prefix": (1 + 1 / 4) / 2,
        "loglik": -3.0,
        "next_token": 0.5,
        "by_length": {"0-4k": 100.0, "4-8k": 0.0, "8k+": None},
    }
    assert ours["tasks"][find]["score"] == 50.0 and "by_length" not in ours["tasks"][find]
    assert ours["mean"] == {
        "score": 50.0,
        "relative": 0.5,
        "same_answer": 0.25,
        "common_prefix": (0.625 + 0.5) / 2,
        "loglik": -2.0,
        "next_token": 0.75,
    }
    assert stock["mean"]["relative"] == stock["mean"]["same_answer"] == 1.0
    assert stock["mean"]["loglik"] == -1.0
    console = Console(width=200, file=io.StringIO())
    console.print(table(report))
    row = "smartgen 50.00 (50.0 %) 50.00 (50.0 %) 50.00 (50.0 %) 25.0 % 56.2 % -2.000 75.0 %"
    assert row in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_without_stock_there_is_nothing_to_compare_with() -> None:
    items = {"multifieldqa_en": [item(1)]}
    predictions = {("multifieldqa_en", 1, "full"): prediction("Ann", [1])}
    row = scores.summary(predictions, items, ["full"])["arms"]["full"]["mean"]
    assert row == {
        "score": 100.0,
        "relative": None,
        "same_answer": None,
        "common_prefix": None,
        "loglik": None,
        "next_token": None,
    }
    assert scores.common_prefix([], []) == 1.0


def test_a_stock_score_of_nothing_has_no_share() -> None:
    items = {"multifieldqa_en": [item(1)]}
    predictions = {
        ("multifieldqa_en", 1, arm): prediction(text, [1])
        for arm, text in (("full", "Ann"), ("stock", "no"))
    }
    assert (
        scores.summary(predictions, items, ["full", "stock"])["arms"]["full"]["mean"]["relative"]
        is None
    )


# The command ----------------------------------------------------------------------------------


def test_the_command_against_running_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, out = tmp_path / "model", tmp_path / "data", tmp_path / "out"
    model.mkdir()
    data.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 300}')
    (data / "multifieldqa_en.jsonl").write_text(
        (json.dumps(line(answers=["Ann Lee", "Ann"])) + "\n") * 3
    )
    monkeypatch.setattr(command.prompts, "load_tokenizer", lambda model: WordTokenizer())
    with stub_server() as (url, seen):
        argv = [
            *("eval", "--format", "json", "--model", str(model), "--data", str(data)),
            *("--out", str(out), "--modes", "smartgen,stock", "--arm", 'all={"ratio": 1}'),
            *("--url", url, "--stock-url", url, "--quick", "--likelihood", "on"),
        ]
        assert cli.main(argv) == 0
        first = capsys.readouterr()
        requests = len(seen)
        assert cli.main(argv) == 0  # all is there
        assert len(seen) == requests == 2 * (1 + 2 + 2) + 2 * (1 + 1 + 1)  # 2 items, 2 pairs
        assert cli.main([*argv, "--max-new-tokens", "9"]) == 2
    report = json.loads(first.out)
    assert first.out.count("\n") == 1
    assert report["items"] == {"multifieldqa_en": 2}
    assert list(report["arms"]) == ["smartgen", "all", "stock"]
    assert report["arms"]["all"]["mean"]["score"] == 100.0
    assert report["arms"]["all"]["mean"]["relative"] == 1.0
    assert json.loads((out / "scores.json").read_text()) == report
    assert seen[0]["sampling_params"]["max_new_tokens"] == 2
    assert {body["sampling_params"]["max_new_tokens"] for body in seen} == {2, 32}
    again = capsys.readouterr()
    assert "setting 'max_new_tokens' was 32, now it is 9" in again.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit is 0; it must be at least 1"),
        (["--tasks", "trec,trec"], "--tasks is 'trec,trec'"),
        (["--tasks", "trek"], "task is 'trek'"),
        (["--tasks", "longbench-e"], "qasper_e.jsonl: No such file"),
        (["--model", "/nowhere"], "--model is /nowhere; allowed is a folder with a config.json"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "multifieldqa_en.jsonl").write_text(json.dumps(line()) + "\n")
    out = tmp_path / "out"
    assert cli.main(["eval", "--data", str(tmp_path), "--out", str(out), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not out.exists()
