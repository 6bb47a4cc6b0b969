"""FlashInfer behind the interface of our operators, with a stand-in for it; and who may ask."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import flashinfer_stand_in as stand_in
import pytest
import torch
from reference.cases import OPERATORS, Source, relative_error
from reference.operators import sparse_decode as attention

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.engine.cuda.kernels import FlashInferKernels, attention_kernels
from sglang_smartgen.select import topk
from sglang_smartgen.triton_kernels import sparse_decode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sglang_smartgen.engine.cuda.kernels.WORK_BYTES", 64)
    stand_in.calls.clear()
    yield
    topk.rank_with(None)


def test_paged_decode_equals_attention_over_rows_and_tail() -> None:
    """The random cases of sparse_decode: padding anywhere, NaN in it, empty rows and tails."""
    kernels = FlashInferKernels(stand_in, CPU)
    seen = set()
    for number in range(150):
        (query, keys, values, index, *rest), _ = OPERATORS["sparse_decode"].make(
            Source(f"flashinfer-{torch.initial_seed()}-{number}")
        )
        # A repeated entry is attended to twice by both.
        found = kernels.attend(query, keys, values, index, *rest)
        wanted = attention(query, keys, values, index, *rest)
        error = relative_error(found, wanted)
        assert error <= 1e-2, (number, error, index.shape, rest[2])
        seen.add((index.shape[2] > 0, rest[2].shape[1] > 0))
    assert len(seen) == 4 and {"run", "merge_state"} == set(stand_in.calls)


def test_radix_top_k_keeps_our_total_order(monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.randint(0, 5, (3, 200)).float()
    score[score == 0] *= torch.where(torch.rand((score == 0).sum()) < 0.5, -1.0, 1.0)  # both zeros
    wanted = topk.top_k(score, 40)
    topk.rank_with(FlashInferKernels(stand_in, CPU).rank)
    assert torch.equal(topk._device_path(score, 40), wanted)
    assert stand_in.calls == ["top_k"]


def test_the_configuration_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    for name in ("auto", "triton"):
        config = SmartGenConfig(attention_kernels=name)  # type: ignore[arg-type]
        assert attention_kernels(config, torch.float32, CPU) is sparse_decode
    config = SmartGenConfig(attention_kernels="flashinfer")
    with pytest.raises(ConfigError, match="bfloat16 or float16; the KV pool is float32"):
        attention_kernels(config, torch.float32, CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="flashinfer, which cannot be imported here"):
        attention_kernels(config, half, CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    assert attention_kernels(config, half, CPU) is not sparse_decode
    assert topk._device_ranking
    attention_kernels(SmartGenConfig(), half, CPU)
    assert not topk._device_ranking
