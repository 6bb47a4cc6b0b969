"""Teacher-forced decoding: the forced token wins, and what the model preferred can be read back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_smartgen.engine.forced_tokens import ForcedTokens
from sglang_smartgen.report.bench_agreement import summary
from sglang_smartgen.report.forced import Forced, force, read_answer

VOCAB, SPARE = 50, 49


def meta_of(logits: torch.Tensor, answer: list[int]) -> dict[str, Any]:
    """What SGLang's meta_info says of an answer whose steps had these logits [n, VOCAB]."""
    top, asked = [], []
    for step, row in enumerate(logits):
        params = {
            "forced": answer,
            "spare": SPARE,
            "__req__": SimpleNamespace(output_ids=answer[:step]),
        }
        forced = ForcedTokens()(row[None].clone(), [params])[0]
        assert int(forced.argmax()) == answer[step]
        logprobs = torch.log_softmax(forced, -1)
        best = logprobs.topk(2)
        top.append([(v, i, None) for v, i in zip(best[0].tolist(), best[1].tolist(), strict=True)])
        asked.append([(float(logprobs[SPARE]), SPARE, None)])
    return {"output_top_logprobs": top, "output_token_ids_logprobs": asked}


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_preferred_tokens_and_their_likelihood_are_read_back(scale: float) -> None:
    made = torch.Generator().manual_seed(3)
    logits = torch.randn(40, VOCAB, generator=made) * scale
    logits[:, SPARE] = -60.0
    answer = torch.randint(0, SPARE, (40,), generator=made).tolist()
    answer[10:20] = logits[10:20].argmax(-1).tolist()  # what the model would say itself
    found = read_answer(meta_of(logits, answer), answer, SPARE)
    assert found.preferred == logits[1:].argmax(-1).tolist()
    wanted = torch.log_softmax(logits, -1)[torch.arange(40), answer][1:]
    assert torch.allclose(torch.tensor(found.logprobs), wanted, atol=2e-3)


def test_behind_the_forced_text_nothing_is_changed() -> None:
    row = torch.randn(1, VOCAB)
    params = {"forced": [1], "spare": SPARE, "__req__": SimpleNamespace(output_ids=[1])}
    assert torch.equal(ForcedTokens()(row.clone(), [params]), row)


def test_a_spare_in_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="spare is 5"):
        force("http://nowhere", [1], [4, 5], 5)


def test_agreement_is_with_the_first_arm() -> None:
    full = [Forced([1, 2, 3, 4], [-1.0] * 4)]
    arm = [Forced([1, 2, 3, 9], [-2.0] * 4)]
    found = summary({"full attention": full, "hata": arm})
    assert found["agreement"] == {"full attention": 1.0, "hata": 0.75}
    assert found["mean_logprob"] == {"full attention": -1.0, "hata": -2.0}
