"""`smartgen calibrate`: what it writes, going on after a stop, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sglang_smartgen.calibrate import artifacts, progress, texts
from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.calibrate.work import WorkFolder
from sglang_smartgen.cli import main
from sglang_smartgen.select import registry
from sglang_smartgen.select.artifact import model_hash, read_artifact
from sglang_smartgen.select.base import KVShape, LayerSample
from sglang_smartgen.select.exact import ExactSelector

SEQUENCES = [tiny_models.token_ids(300, seed=1), tiny_models.token_ids(280, seed=2)]


class MeanSelector(ExactSelector):
    """Calibrates the mean key, times `factor`; stops when told to."""

    name: ClassVar[str] = "mean"
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({"factor": 1.0})
    calibrated: ClassVar[frozenset[str]] = frozenset({"factor"})
    seen: ClassVar[list[int]] = []
    stop_at: ClassVar[int] = -1

    @classmethod
    def calibrate(
        cls,
        shape: KVShape,
        layer: int,
        samples: list[LayerSample],
        options: Mapping[str, object],
    ) -> dict[str, Tensor]:
        if layer == cls.stop_at:
            raise KeyboardInterrupt
        cls.seen.append(layer)
        factor = float(str(options["factor"]))
        return {"mean": factor * torch.cat([s.keys for s in samples]).mean(0)}


@pytest.fixture(autouse=True)
def mean_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SELECTORS, "mean", MeanSelector)
    monkeypatch.setattr(MeanSelector, "seen", [])


@pytest.fixture
def model(tmp_path: Path) -> LayeredModel:
    folder = tmp_path / "model"
    tiny_models.make_model("llama", folder)
    return LayeredModel(folder)


def make(model: LayeredModel, out: Path, factor: float = 1.0) -> artifacts.Made:
    return artifacts.make_artifact(model, SEQUENCES, "mean", out, {"factor": factor}, quiet=True)


def test_artifact_has_every_selected_layer_and_says_what_it_is_of(
    model: LayeredModel, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    made = make(model, out, factor=2)
    artifact = read_artifact(out)
    assert artifact.layers() == made.layers == [2, 3, 4]
    assert artifact.manifest.selector == "mean"
    assert artifact.manifest.parameters == {"factor": 2.0}
    assert artifact.manifest.model_hash == model_hash(model.folder)
    assert artifact.manifest.text_hash == texts.hash_sequences(SEQUENCES)
    assert artifact.manifest.kv_heads == 2
    assert made.tokens == 580
    assert [path.name for path in tmp_path.glob(".*")] == []  # no work folder is left


def test_gemma_calibrates_its_full_attention_layers_only(tmp_path: Path) -> None:
    tiny_models.make_model("gemma3", tmp_path)
    made = make(LayeredModel(tmp_path), tmp_path / "a.safetensors")
    assert made.layers == MeanSelector.seen == [2, 5]


def test_a_stopped_run_is_gone_on_with(
    model: LayeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "a.safetensors"
    make(model, whole)
    MeanSelector.seen.clear()
    monkeypatch.setattr(MeanSelector, "stop_at", 4)
    with pytest.raises(KeyboardInterrupt):
        make(model, out)
    assert not out.exists()
    monkeypatch.setattr(MeanSelector, "stop_at", -1)
    made = make(model, out)
    assert MeanSelector.seen == [2, 3, 4]  # each layer once over both runs
    assert made.resumed_layers == 4
    a, b = read_artifact(whole).tensors, read_artifact(out).tensors
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_stopped_run_of_other_options_is_not_gone_on_with(
    model: LayeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.safetensors"
    monkeypatch.setattr(MeanSelector, "stop_at", 4)
    with pytest.raises(KeyboardInterrupt):
        make(model, out)
    monkeypatch.setattr(MeanSelector, "stop_at", -1)
    assert make(model, out, factor=3).resumed_layers == 0


@pytest.mark.parametrize(("file", "resumed"), [("part-3", 3), ("hidden-4", 3), ("hidden-5", 4)])
def test_a_killed_run_is_gone_on_with(
    model: LayeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, resumed: int
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "a.safetensors"
    make(model, whole)

    class Killed(BaseException):
        """Nothing of ours runs after it but the release of the lock, as after SIGKILL."""

    def killed(tensors: dict[str, Tensor], path: Path) -> None:
        if file in path.name:
            path.write_bytes(b"half of it")
            raise Killed
        save_file(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("safetensors.torch.save_file", killed)
        make(model, out)
    made = make(model, out)
    assert made.resumed_layers == resumed
    a, b = read_artifact(out).tensors, read_artifact(whole).tensors
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_two_runs_do_not_share_a_work_folder(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    with WorkFolder(out, {"x": 1}):
        with pytest.raises(CalibrationError, match="another calibration is writing"):
            WorkFolder(out, {"x": 1}).__enter__()
        with WorkFolder(out, {"x": 2}):
            pass
    with WorkFolder(out, {"x": 1}):
        pass


def test_command_prints_one_json_object(
    model: LayeredModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "a.safetensors"
    text.write_text(tiny_models.words(700))
    argv = ["calibrate", str(model.folder), str(text), "--selector", "infinigen"]
    argv += ["--out", str(out), "--option", "width=0.5", "--option", "mode=skew"]
    argv += ["--sequence-tokens", "300", "--total-tokens", "600", "--format", "json"]
    code = main(argv)
    lines = capfd.readouterr().out.splitlines()
    assert code == 0
    assert len(lines) == 1
    report = json.loads(lines[0])
    assert report["parameters"] == {"mode": "skew", "width": 0.5}
    assert (report["sequences"], report["tokens"], report["layers"]) == (2, 600, [2, 3, 4])
    assert report["peak_rss_mb"] > 50
    assert read_artifact(out).tensors["matrix.2"].shape == (2, 16, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": []}, "TEXT is missing; calibration needs at least one text file"),
        ({"text": ["short.txt"]}, "has 20 tokens; at least 256 are needed"),
        ({"text": ["absent.txt"]}, "cannot be read: No such file or directory"),
        ({"text": ["binary.bin"]}, "cannot be read: it is not UTF-8 text"),
        ({"selector": "infinity"}, "selector is 'infinity'; allowed are exact, hata"),
        ({"selector": "exact"}, "selector exact has nothing to calibrate"),
        ({"option": "width"}, "--option is 'width'; allowed is NAME=VALUE"),
        ({"option": "wide=1"}, "selector infinigen has no option 'wide'; allowed are mode, width"),
        ({"option": "width=big"}, "width is 'big'; it must be a float"),
        ({"option": "width=1.5"}, "width is 1.5; it must be above 0 and at most 1"),
        ({"option": "alpha=3"}, "selector infinigen has no option 'alpha'"),
        ({"model": "."}, "allowed is a folder with a config.json"),
        ({"out": "."}, "--out is .; allowed is a file in a folder that exists"),
        ({"out": "absent/a"}, "--out is absent/a; allowed is a file in a folder that exists"),
        ({"tokens": "100"}, "--sequence-tokens is 100; it must be at least 256"),
        ({"tokens": "2000"}, "--sequence-tokens is 2000; the model has 1024 positions"),
        ({"total": "299"}, "--total-tokens is 299; it must be at least --sequence-tokens, 300"),
    ],
)
def test_bad_input_is_one_sentence(
    model: LayeredModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(tiny_models.words(300))
    Path("short.txt").write_text(tiny_models.words(20))
    Path("binary.bin").write_bytes(b"\xff\xfe\x00")
    given_ = {"model": "model", "text": ["good.txt"], "selector": "infinigen", "out": "a"}
    given_ |= {"option": "width=0.5", "tokens": "300", "total": "600"} | change
    argv = ["calibrate", given_["model"], *given_["text"], "--selector", given_["selector"]]
    argv += ["--out", given_["out"], "--option", given_["option"]]
    argv += ["--sequence-tokens", given_["tokens"], "--total-tokens", given_["total"]]
    assert main(argv) == 2
    shown = capfd.readouterr()
    assert message in shown.err
    assert shown.err.startswith("smartgen calibrate: ")
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""
    assert not Path("a").exists()


class Letters:
    """A tokenizer of one token a letter."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(256, 2000), min_size=1, max_size=4),
    length=st.integers(260, 900),
    extra=st.integers(0, 3000),
    begin=st.lists(st.just(2), max_size=2),
)
def test_sequences_fit_and_are_pieces_of_the_texts(
    sizes: list[int], length: int, extra: int, begin: list[int]
) -> None:
    contents = {
        str(i): "".join(chr(1000 * (i + 1) + j % 997) for j in range(size))
        for i, size in enumerate(sizes)
    }
    total = length + extra
    cut = texts.token_sequences(contents, Letters(), begin, length=length, total=total)
    assert cut
    assert sum(map(len, cut)) <= total
    joined = [[ord(letter) for letter in text] for text in contents.values()]
    for sequence in cut:
        assert texts.MIN_TOKENS + len(begin) <= len(sequence) <= length
        assert sequence[: len(begin)] == begin
        body = sequence[len(begin) :]
        text = joined[body[0] // 1000 - 1]
        assert any(
            text[at : at + len(body)] == body for at in range(0, len(text), length - len(begin))
        )
    # Every text is there before any has two pieces, as far as the total reaches.
    firsts = [sequence[len(begin)] // 1000 for sequence in cut[: len(sizes)]]
    assert firsts == list(range(1, len(firsts) + 1))


def test_gemma_begins_with_bos_although_its_tokenizer_forgets_it() -> None:
    assert texts.start_ids(Letters(), "gemma3_text") == [2]
    assert texts.start_ids(Letters(), "llama") == []


def test_time_left_counts_only_this_run() -> None:
    now = 100.0
    left = progress.TimeLeft(total=30, done=10, clock=lambda: now)
    assert left.text(10) == "time left unknown"
    now = 130.0
    assert left.text(13) == "3 min left"
    now = 250.0
    assert left.text(25) == "50 s left"
