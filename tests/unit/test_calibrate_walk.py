"""The layer walk against the whole model of transformers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.calibrate.walk import causal_attention, walk
from sglang_smartgen.report.model_cache import ensure_model

KINDS = ("llama", "qwen3", "gemma3")
IDS = tiny_models.token_ids(70)  # longer than the window of the sliding layers
FULL_GEMMA = [2, 5]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, LayeredModel, Any]:
    """The layered model, and what the whole model makes of IDS."""
    whole = tiny_models.make_model(request.param, tmp_path)
    with torch.inference_mode():
        out = whole(torch.tensor([IDS]), output_attentions=True, output_hidden_states=True)
    return request.param, LayeredModel(tmp_path), out


def test_every_layer_does_what_the_whole_model_does(pair: tuple[str, LayeredModel, Any]) -> None:
    _, model, out = pair
    hidden = [model.embed(IDS)]
    torch.testing.assert_close(hidden[0], out.hidden_states[0][0])
    for step in walk(model, hidden):
        if step.layer + 1 < model.layers:  # behind the last layer transformers gives the normed one
            torch.testing.assert_close(
                step.hidden[0], out.hidden_states[step.layer + 1][0], rtol=1e-4, atol=1e-4
            )
        hidden = step.hidden
    torch.testing.assert_close(
        model.logits(hidden[0], rows=40), out.logits[0], rtol=1e-4, atol=1e-4
    )


def test_queries_and_keys_give_the_attention_of_the_whole_model(
    pair: tuple[str, LayeredModel, Any],
) -> None:
    kind, model, out = pair
    windows = [
        tiny_models.WINDOW if kind == "gemma3" and i not in FULL_GEMMA else None
        for i in range(model.layers)
    ]
    t = torch.arange(len(IDS))
    for step in walk(model, [model.embed(IDS)]):
        assert step.window == windows[step.layer]
        queries, keys = step.samples[0].queries, step.samples[0].keys
        keys = keys.repeat_interleave(model.shape.group, dim=1)
        logits = torch.einsum("thd,nhd->htn", queries, keys) * model.shape.scaling
        hidden = t[None, :] > t[:, None]
        if step.window is not None:
            hidden |= t[None, :] <= t[:, None] - step.window
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(weights, out.attentions[step.layer][0], rtol=1e-3, atol=1e-4)


def test_lookahead_is_the_next_layer_asked_with_the_residual_before(
    pair: tuple[str, LayeredModel, Any],
) -> None:
    _, model, out = pair
    steps = list(walk(model, [model.embed(IDS)], lookahead=True))
    assert steps[0].lookahead == []
    for step in steps:
        layer = model.layer(step.layer)
        own = layer.query(out.hidden_states[step.layer][0])
        torch.testing.assert_close(own, step.samples[0].queries, rtol=1e-3, atol=1e-4)
        if step.layer:
            before = out.hidden_states[step.layer - 1][0]
            torch.testing.assert_close(step.lookahead[0], layer.query(before), rtol=1e-3, atol=1e-4)
            assert not torch.allclose(step.lookahead[0], step.samples[0].queries, atol=1e-2)
            late = layer.query(before[60:], first_position=60)
            torch.testing.assert_close(late, step.lookahead[0][60:], rtol=1e-3, atol=1e-4)


def test_a_walk_can_start_in_the_middle(tmp_path: Path) -> None:
    tiny_models.make_model("gemma3", tmp_path)
    model = LayeredModel(tmp_path)
    steps = list(walk(model, [model.embed(IDS)]))
    again = list(walk(model, steps[2].hidden, first=3, stop=5))
    assert [step.layer for step in again] == [3, 4]
    assert torch.equal(again[1].hidden[0], steps[4].hidden[0])


def test_smollm2_walk_equals_the_whole_model() -> None:
    from transformers import AutoModelForCausalLM

    folder = ensure_model()
    ids = list(range(1000, 1048))
    model = LayeredModel(folder)
    hidden = [model.embed(ids)]
    for step in walk(model, hidden):
        hidden = step.hidden
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = whole(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(model.logits(hidden[0]), expected, rtol=1e-3, atol=1e-3)


def test_bfloat16_weights_are_walked_in_float32(tmp_path: Path) -> None:
    whole = tiny_models.make_model("qwen3", tmp_path, torch.bfloat16)
    model = LayeredModel(tmp_path)
    hidden = [model.embed(IDS)]
    for step in walk(model, hidden):
        assert step.samples[0].keys.dtype == torch.float32
        hidden = step.hidden
    with torch.inference_mode():
        expected = whole(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(model.logits(hidden[0]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [5, 600])
def test_sliding_attention_in_pieces_equals_a_plain_mask(length: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(heads, length, 8) for heads in (4, 2, 2))
    t = torch.arange(length)
    hidden = (t[None] > t[:, None]) | (t[None] <= t[:, None] - 70)
    logits = (q @ k.repeat_interleave(2, 0).transpose(1, 2)) * 0.3
    expected = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 0)
    torch.testing.assert_close(causal_attention(q, k, v, 0.3, 70), expected, rtol=1e-4, atol=1e-5)


def test_memory_holds_a_layer_and_not_the_model(tmp_path: Path) -> None:
    # A process of its own: its high-water mark before and after the walk.
    script = textwrap.dedent(
        """
        import json, resource, sys, torch
        from pathlib import Path
        from transformers import AutoModelForCausalLM, LlamaConfig
        from safetensors.torch import save_file
        from sglang_smartgen.calibrate.model import LayeredModel
        from sglang_smartgen.calibrate.walk import walk

        folder = Path(sys.argv[1])
        config = LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
                             num_attention_heads=8, num_key_value_heads=4, vocab_size=2000)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        names, size = {}, 0
        for number, (name, value) in enumerate(empty.named_parameters()):
            part = f"part-{number}.safetensors"  # so that writing needs no memory either
            save_file({name: torch.full(value.shape, 0.01)}, folder / part)
            names[name], size = part, size + value.numel() * 4
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        model = LayeredModel(folder)
        before = peak()
        for step in walk(model, [model.embed(list(range(64)))] * 2):
            pass
        print(size, peak() - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    size, grown = map(int, done.stdout.split())
    assert size > 120e6
    assert grown < size / 2


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"a folder with a config\.json"):
        LayeredModel(tmp_path)
    tiny_models.make_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:100])
    with pytest.raises(CalibrationError, match="cannot be read"):
        LayeredModel(tmp_path)
    weights.unlink()
    with pytest.raises(CalibrationError, match=r"no model\.safetensors"):
        LayeredModel(tmp_path)
    weights.write_bytes(data)
    with pytest.raises(CalibrationError, match="outside of the vocabulary"):
        LayeredModel(tmp_path).embed([5, 97])
    tiny_models.set_model_type(tmp_path, "gpt2")
    with pytest.raises(CalibrationError, match=r"model type .* is gpt2; allowed are llama"):
        LayeredModel(tmp_path)
