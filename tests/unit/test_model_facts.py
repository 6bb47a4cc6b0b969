"""Models that SmartGen cannot serve are refused by what their pool says, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine.model_facts import read_model


class DeepseekForCausalLM:
    """Stands for a model with latent attention."""


@pytest.mark.parametrize("pool", ["MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"])
def test_other_pools_are_refused(pool: str) -> None:
    runner = SimpleNamespace(token_to_kv_pool=type(pool, (), {})(), model=DeepseekForCausalLM())
    with pytest.raises(ConfigError) as caught:
        read_model(runner)
    assert str(caught.value) == (
        f"SmartGen cannot serve DeepseekForCausalLM: its KV pool is {pool}; allowed is plain "
        "multi-head or grouped-query attention (MHATokenToKVPool)"
    )
