"""Tiny random models of the supported kinds, as Hugging Face folders, and a word tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCABULARY = 97
WINDOW = 24  # of the sliding layers of Gemma-3
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def config(kind: str) -> Any:
    """The config of `llama`, `qwen3` or `gemma3`; only the last has sliding layers."""
    if kind == "llama":
        return LlamaConfig(**COMMON, num_hidden_layers=5, tie_word_embeddings=False)
    if kind == "qwen3":
        return Qwen3Config(**COMMON, num_hidden_layers=4, tie_word_embeddings=True)
    return Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        query_pre_attn_scalar=64,  # not the head dim: the scale of the logits is its own
    )


def make_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a random model with its tokenizer to `folder` and return it, eager and float32."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Random norms too, or a norm taken from the wrong layer would go unnoticed.
            value.normal_(std=0.3 if "norm" in name else 0.15)
            if "norm" in name and kind != "gemma3":
                value.add_(1.0)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that knows the words w4 to w96."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
    words |= {f"w{i}": i for i in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>").save_pretrained(folder)


def words(count: int, seed: int = 0) -> str:
    """A text of `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()
    return " ".join(f"w{i}" for i in ids)


def token_ids(count: int, seed: int = 0) -> list[int]:
    """The token ids of `words`."""
    return [int(word[1:]) for word in words(count, seed).split()]


def set_model_type(folder: Path, model_type: str) -> None:
    """Make the folder look like another kind of model."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
