"""One decode step of the small model in Hugging Face transformers: a yardstick for other costs."""

from __future__ import annotations

from typing import Any

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.report.model_cache import ensure_model


class DecodeStep:
    """A batch that has `tokens` tokens in its KV cache; a call decodes one more.

    The cache is random: the time of a step does not depend on what is in it. Raises
    ModelCacheError when the model is not there and cannot be made.
    """

    def __init__(self, batch: int, tokens: int) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(ensure_model(), dtype=torch.float32).eval()
        config = self._model.config
        self.layers = int(config.num_hidden_layers)
        self._cache = transformers.DynamicCache(config=config)
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, tokens, head_dim)
        for layer in range(self.layers):
            self._cache.update(torch.randn(shape), torch.randn(shape), layer)
        self._next = torch.full((batch, 1), 5)

    @property
    def sparse_layers(self) -> int:
        """Layers in which SmartGen selects."""
        return self.layers - DENSE_LAYERS

    def __call__(self) -> None:
        """Decode one token a request; the cache grows by it."""
        import torch

        with torch.inference_mode():
            self._model(input_ids=self._next, past_key_values=self._cache, use_cache=True)
