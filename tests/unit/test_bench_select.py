"""The measurements of `smartgen bench select` on tiny models, and its report."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import tiny_models
import torch
from rich.console import Console

from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.config import ConfigError
from sglang_smartgen.report import agreement, bench_select, captured_mass, model_cache
from sglang_smartgen.report.captured_mass import captured, late_positions, true_weights
from sglang_smartgen.report.select_arms import ARMS, Arm, ensure_artifact
from sglang_smartgen.report.select_cost import measure_cost
from sglang_smartgen.report.select_report import Report, agreement_bars, mass_bars
from sglang_smartgen.report.select_texts import calibration_texts, held_out_texts
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.hata import HataSelector
from sglang_smartgen.select.registry import make_selector

EXACT = Arm("exact", "exact", lookahead=False, calibrated=False)
AHEAD = Arm("exact+lookahead", "exact", lookahead=True, calibrated=False)
STREAMING = Arm("streaming", "streaming", lookahead=False, calibrated=False)
TEXTS = [tiny_models.token_ids(90, seed=3), tiny_models.token_ids(90, seed=4)]


def quiet(layers: int) -> None:
    """No progress."""


def selectors(model: LayeredModel, *arms: Arm) -> dict[Arm, Selector]:
    return {arm: make_selector(arm.selector, model.shape) for arm in arms}


@pytest.fixture(params=["llama", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LayeredModel, Any]:
    whole = tiny_models.make_model(request.param, tmp_path)
    return LayeredModel(tmp_path), whole


def layers_of(model: LayeredModel) -> list[int]:
    return [layer for layer in range(2, model.layers) if model.window(layer) is None]


def test_captured_mass_of_a_known_choice() -> None:
    weights = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert captured(weights, torch.tensor([[0, 1], [2, 3]])) == pytest.approx(0.7)
    assert captured(weights, torch.tensor([[0, -1], [3, -1]])) == pytest.approx(0.45)


def test_true_weights_average_the_attention_of_the_group() -> None:
    shape = KVShape(layers=1, q_heads=4, kv_heads=2, head_dim=8, scaling=0.2)
    generator = torch.Generator().manual_seed(5)
    query, keys = torch.randn(4, 8, generator=generator), torch.randn(9, 2, 8, generator=generator)
    weights = true_weights(shape, query, keys)
    for head in range(2):
        rows = [((keys[:, head] @ query[q]) * 0.2).softmax(0) for q in (2 * head, 2 * head + 1)]
        torch.testing.assert_close(weights[head], (rows[0] + rows[1]) / 2)


def test_exact_is_the_best_choice_of_its_size() -> None:
    shape = KVShape(layers=1, q_heads=4, kv_heads=2, head_dim=8, scaling=1.0)
    generator = torch.Generator().manual_seed(6)
    query, keys = torch.randn(4, 8, generator=generator), torch.randn(7, 2, 8, generator=generator)
    weights, selector = true_weights(shape, query, keys), make_selector("exact", shape)
    score = selector.score(0, query.view(2, 2, 8), selector.encode(0, keys, None))
    best = captured(weights, selector.pick(score, 3))
    for choice in itertools.combinations(range(7), 3):
        assert captured(weights, torch.tensor([choice, choice])) <= best + 1e-6


def test_late_positions_are_spread_over_the_end() -> None:
    assert late_positions(3000, 32) == list(range(2999 - 31 * 16, 3000, 16))
    assert late_positions(20, 10) == list(range(10, 20))
    with pytest.raises(ValueError, match="queries is 11; with 20 tokens 1 to 10"):
        late_positions(20, 11)


def test_mass_is_measured_on_selected_layers_with_the_right_query(
    tiny: tuple[LayeredModel, Any],
) -> None:
    model, whole = tiny
    layers = layers_of(model)
    arms = selectors(model, EXACT, AHEAD, STREAMING)
    masses = captured_mass.measure_mass(model, TEXTS, arms, layers, 4, quiet)
    assert {(text, layer) for _, _, text, layer in masses} == {
        (text, layer) for text in (0, 1) for layer in layers
    }
    # By hand, for the last layer and the second text, from the attention of the whole model.
    layer, positions = layers[-1], late_positions(90, 4)
    with torch.inference_mode():
        out = whole(torch.tensor([TEXTS[1]]), output_attentions=True)
    attention = out.attentions[layer][0].view(2, 2, 90, 90).mean(1)
    for ratio in captured_mass.RATIOS:
        expected, recent = [], []
        for t in positions:
            weights = attention[:, t, :t] / attention[:, t, :t].sum(-1, keepdim=True)
            # Each query head has its own softmax over the prompt, so the mean needs care:
            heads = out.attentions[layer][0][:, t, :t]
            weights = (heads / heads.sum(-1, keepdim=True)).view(2, 2, t).mean(1)
            k = -(-t * round(100 * ratio) // 100)
            expected.append(weights.topk(k).values.sum(-1).mean())
            kept = [*range(min(4, k)), *range(t - (k - min(4, k)), t)]
            recent.append(weights[:, kept].sum(-1).mean())
        got = masses["exact", ratio, 1, layer], masses["streaming", ratio, 1, layer]
        assert got[0] == pytest.approx(float(torch.stack(expected).mean()), abs=1e-4)
        assert got[1] == pytest.approx(float(torch.stack(recent).mean()), abs=1e-4)
        ahead = captured_mass.mean_mass(masses, "exact+lookahead", ratio)
        assert ahead < captured_mass.mean_mass(masses, "exact", ratio)


def test_steps_that_use_everything_agree_with_the_whole_model(
    tiny: tuple[LayeredModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tiny
    arms = selectors(model, EXACT, AHEAD, STREAMING)
    texts: list[Any] = []
    monkeypatch.setattr(
        agreement, "_Text", lambda *a, make=agreement._Text: texts.append(make(*a)) or texts[-1]
    )
    monkeypatch.setattr(agreement, "budget", lambda length, ratio: length)
    out = agreement.measure_agreement(model, TEXTS, arms, layers_of(model), 20, quiet)
    assert out == {arm.name: [1.0, 1.0] for arm in arms}
    for ids, text in zip(TEXTS, texts, strict=True):
        with torch.inference_mode():
            expected = whole(torch.tensor([ids])).logits[0, -20:]
        for hidden in (text.full, *text.arms.values()):
            torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-3, atol=1e-3)


def test_steps_attend_to_what_was_chosen_and_no_more(
    tiny: tuple[LayeredModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One selected layer and one head's worth of choice by hand: the eager attention of the whole
    # model with everything else masked.
    model, whole = tiny
    layer = layers_of(model)[0]
    chosen = torch.zeros(2, 20, 70, dtype=torch.bool)
    chosen[0, :, 3:9] = True
    chosen[1, :, 40:60:2] = True
    monkeypatch.setattr(agreement, "choose_entries", lambda *a: chosen)
    texts: list[Any] = []
    monkeypatch.setattr(
        agreement, "_Text", lambda *a, make=agreement._Text: texts.append(make(*a)) or texts[-1]
    )
    arms = selectors(model, EXACT)
    agreement.measure_agreement(model, TEXTS[:1], arms, [layer], 20, quiet)

    mask = torch.full((4, 90, 90), float("-inf")).triu(1)
    blocked = torch.where(chosen, 0.0, float("-inf")).repeat_interleave(2, dim=0)
    mask[:, 70:, :70] = blocked

    def masked(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": mask[None]}

    hook = whole.model.layers[layer].self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    with torch.inference_mode():
        expected = whole(torch.tensor(TEXTS[:1])).logits[0, -20:]
    hook.remove()
    got = model.logits(texts[0].arms[EXACT])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(got, model.logits(texts[0].full), atol=1e-2)


def test_a_lookahead_arm_scores_with_the_layer_before(
    tiny: tuple[LayeredModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tiny
    layer, asked = layers_of(model)[0], []
    plain = agreement.choose_entries

    def spy(selector: Selector, index: int, queries: torch.Tensor, entries: torch.Tensor) -> Any:
        asked.append((index, queries))
        return plain(selector, index, queries, entries)

    monkeypatch.setattr(agreement, "choose_entries", spy)
    arms = selectors(model, EXACT, AHEAD)
    agreement.measure_agreement(model, TEXTS[:1], arms, layers_of(model), 20, quiet)
    with torch.inference_mode():
        hidden = whole(torch.tensor(TEXTS[:1]), output_hidden_states=True).hidden_states
    for (index, queries), source in zip(asked[:2], (layer, layer - 1), strict=True):
        assert index == layer
        expected = model.layer(layer).query(hidden[source][0, 70:], 70)
        torch.testing.assert_close(queries, expected, rtol=1e-3, atol=1e-3)


def test_cost_counts_the_selected_layers(tmp_path: Path) -> None:
    tiny_models.make_model("gemma3", tmp_path)
    model = LayeredModel(tmp_path)
    costs = measure_cost(model, TEXTS[0], selectors(model, EXACT, AHEAD, STREAMING), [2, 5], quiet)
    assert costs["exact"].metadata_bytes == 2 * 2 * 16 * 4
    assert costs["streaming"].metadata_bytes == 0
    assert 0 < costs["exact"].selection_s < costs["exact+lookahead"].selection_s
    assert costs["exact"].step_s == costs["streaming"].step_s > 0


def test_artifacts_are_made_once_and_for_their_text(tmp_path: Path) -> None:
    tiny_models.make_model("llama", tmp_path / "m")
    model, folder = LayeredModel(tmp_path / "m"), tmp_path / "artifacts"
    first = ensure_artifact(model, TEXTS, "infinigen", folder)
    again = ensure_artifact(model, TEXTS, "infinigen", folder)
    assert again.manifest == first.manifest  # its time of making too
    ensure_artifact(model, TEXTS[:1], "infinigen", folder)
    assert len(list(folder.iterdir())) == 2
    path = next(p for p in folder.iterdir() if first.manifest.text_hash[:8] in p.name)
    path.write_bytes(path.read_bytes()[:-5])
    assert ensure_artifact(model, TEXTS, "infinigen", folder).manifest.selector == "infinigen"


def test_calibration_and_held_out_texts_have_nothing_in_common() -> None:
    def pieces(texts: dict[str, str]) -> set[str]:
        whole = " ".join(" ".join(text.split()) for text in texts.values())
        return {whole[i : i + 80] for i in range(0, len(whole) - 80)}

    calibration, held_out = calibration_texts(), held_out_texts()
    assert len(held_out) == 4
    assert all(len(text) > 30_000 for text in held_out.values())
    # Pages of one manual share a phrase here and there.
    both = pieces(calibration) & pieces(held_out)
    assert len(both) < 200, sorted(both)[:3]


MASS = {
    "exact": 0.93,
    "exact+lookahead": 0.92,
    "infinigen": 0.885,
    "hata": 0.90,
    "hata+lookahead": 0.90,
    "hata-orthogonal": 0.88,
    "quest": 0.86,
    "streaming": 0.70,
}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"infinigen": 0.879}, ["m: infinigen", "m: infinigen, exact less 0.05"]),
        ({"hata": 0.889}, ["m: hata"]),
        ({"hata": 0.87}, ["m: hata", "m: hata, above hata-orthogonal"]),
        ({"hata-orthogonal": 0.869}, ["m: hata-orthogonal"]),
        ({"quest": 0.84}, ["m: quest, streaming plus 0.15"]),
    ],
)
def test_mass_bars(change: dict[str, float], missed: list[str]) -> None:
    mass = {arm: {"0.10": value} for arm, value in (MASS | change).items()}
    assert [bar.text for bar in mass_bars("m", mass) if not bar.holds] == missed


def test_agreement_bars() -> None:
    good = {"exact": 0.96, "hata": 0.92, "streaming": 0.5}
    assert all(bar.holds for bar in agreement_bars(good))
    low = [bar.text for bar in agreement_bars({"exact": 0.94, "hata": 0.89}) if not bar.holds]
    assert low == ["agreement: exact", "agreement: hata, exact less 0.04"]


def test_the_command_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sglang_smartgen import cli
    from sglang_smartgen.report import select_texts

    tiny_models.make_model("llama", tmp_path / "tiny")
    texts = {str(i): tiny_models.words(700, seed=i) for i in range(4)}
    monkeypatch.setattr(select_texts, "calibration_texts", lambda: texts)
    monkeypatch.setattr(select_texts, "held_out_texts", lambda: texts)
    short = MappingProxyType({**HataSelector.defaults, "steps": 3})
    monkeypatch.setattr(HataSelector, "defaults", short)
    argv = ["bench", "select", "--quick", "--model", str(tmp_path / "tiny"), "--tokens", "500"]
    argv += ["--artifacts-dir", str(tmp_path / "a"), "--out-dir", str(tmp_path / "out")]
    assert cli.main([*argv, "--format", "json"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    names = [arm.name for arm in ARMS]
    assert list(result)[-2:] == ["mass", "agreement"]
    assert list(result["mass"]["tiny"]) == list(result["agreement"]) == names
    assert list(result["mass"]["tiny"]["hata"]) == ["0.05", "0.10", "0.20"]
    assert result["mass"]["tiny"]["exact"]["0.20"] > result["mass"]["tiny"]["exact"]["0.05"]
    rows = [json.loads(line) for line in (tmp_path / "out/select.jsonl").read_text().splitlines()]
    assert rows[0]["kind"] == "machine"
    assert rows[0]["versions"]["torch"]
    mass = [r for r in rows if r["kind"] == "mass"]
    assert len(mass) == len(ARMS) * 3 * 3  # arms, ratios, layers of one text
    assert (tmp_path / "out/select.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_mass_agreement_and_cost() -> None:
    report = Report(quick=False)
    report.mass = {"m": {arm: {"0.05": v - 0.1, "0.10": v, "0.20": v} for arm, v in MASS.items()}}
    report.agreement = dict.fromkeys(MASS, 0.955)
    from sglang_smartgen.report.select_cost import Cost

    report.cost = {"m": dict.fromkeys(MASS, Cost(1680, 0.0123, 0.080))}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table("m"))
    shown = console.export_text()
    row = next(line for line in shown.splitlines() if " infinigen " in line)
    assert row.split() == ["infinigen", "0.785", "0.885", "0.885", "95.5%", "1,680", "12.3"]
    assert "a step takes 80 ms" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": ["llama9"]}, "--model is llama9; allowed are smollm2, gemma3 and a folder"),
        ({"model": ["gemma3", "gemma3"]}, "each model is allowed once"),
        ({"tokens": 100}, "--tokens is 100; it must be at least 500"),
        ({"out_dir": Path(sys.executable) / "x"}, "--out-dir is .*: Not a directory"),
    ],
)
def test_bad_arguments_are_one_sentence(
    given: dict[str, object], message: str, tmp_path: Path
) -> None:
    args = {"model": None, "quick": False, "tokens": None, "out_dir": tmp_path / "o"} | given
    with pytest.raises(ConfigError, match=message):
        bench_select.check_arguments(argparse.Namespace(**args))


def test_gemma_is_put_together_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTGEN_CACHE", str(tmp_path))
    packages = tmp_path / "packages" / model_cache.GEMMA_NAME
    made = packages / model_cache.GEMMA_PACKAGE
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(
        "from pathlib import Path\nMODEL_NAME = 'g.gguf'\n"
        "def assemble(path):\n    Path(path).write_text('joined')\n    return path\n"
    )
    monkeypatch.setattr(model_cache.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, model_cache.GEMMA_PACKAGE, raising=False)
    path_before = list(sys.path)
    assert model_cache._gemma_file(tmp_path).read_text() == "joined"
    assert sys.path == path_before
    monkeypatch.delitem(sys.modules, model_cache.GEMMA_PACKAGE)


def test_gemma_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(model_cache.sys, "executable", "/bin/false")
    with pytest.raises(model_cache.ModelCacheError, match=r"cannot be fetched .*gemma3\.txt"):
        model_cache._install_gemma(tmp_path / "packages" / "g")
    assert list((tmp_path / "packages").iterdir()) == []
