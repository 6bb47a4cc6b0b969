"""Tiny random models of the kinds that have no small real one here, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 256
WINDOW = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # Large enough that attention matters to the answer of a model that nobody trained.
    "initializer_range": 0.25,
}


def save_model(kind: str, folder: Path) -> None:
    """Write a random float32 model `qwen3` or `gemma3` to `folder`; the same one every time.

    Gemma-3 slides over 64 tokens in its even layers and attends to everything in the odd ones.
    """
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        PreTrainedModel,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(11)
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_COMMON, tie_word_embeddings=False))
    else:
        slides = ["sliding_attention", "full_attention"] * 4
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_COMMON, sliding_window=WINDOW, layer_types=slides, query_pre_attn_scalar=24
            )
        )
    # Gemma ties its head to its embeddings: large ones would make every token predict itself.
    model.get_input_embeddings().weight.data.mul_(0.1)
    for name, weight in model.named_parameters():
        if "norm" in name:  # a norm that is left out or doubled must be noticed
            weight.data.add_(0.3 * torch.randn_like(weight))
    model.to(torch.float32).save_pretrained(folder)
