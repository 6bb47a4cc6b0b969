"""What SmartGen cannot serve is refused at start, in one sentence, and nothing half-starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = '{"selector": "hata"}'


def launch(model: Path, *flags: str, config: str = CONFIG) -> subprocess.CompletedProcess[str]:
    """Start a decode server that must end by itself."""
    command = [sys.executable, "-P", "-m", "sglang_smartgen.launch_server", "--model-path", model]
    command += ["--disaggregation-mode", "decode", "--dtype", "float32"]
    command += ["--mem-fraction-static", "0.7", "--max-total-tokens", "2000"]
    command += ["--enable-smartgen", "--smartgen-config", config, *flags]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """SmartGen's own line of what the server printed."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("SmartGen: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    return lines[0]


@pytest.mark.usefixtures("no_pair")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--disaggregation-enable-kv-checksum"], "--disaggregation-enable-kv-checksum is True"),
        (["--page-size", "16"], "--page-size is 16; SmartGen allows unset or 1"),
    ],
)
def test_option(model: Path, flags: list[str], said: str) -> None:
    done = launch(model, *flags)
    assert done.returncode == 2
    assert said in sentence(done)


@pytest.mark.usefixtures("no_pair")
def test_model_without_full_attention(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention"] * 6,
        max_position_embeddings=2048,
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    done = launch(tmp_path)
    assert done.returncode != 0
    assert "cannot serve Gemma3ForCausalLM: every layer from 2 on has a sliding" in sentence(done)
