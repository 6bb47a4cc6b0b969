"""InfiniGen: a few numbers of every key, chosen offline, score it with partial logits.

Source: InfiniGen (OSDI 2024), with one static choice per layer and KV head instead of one a
prompt, so that the metadata of a token depends on its key alone, and the group softmax-sum for
grouped-query attention. The KV pool keeps its own keys: nothing is folded into the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor

from sglang_smartgen.select.base import LayerSample, Selector, top_k
from sglang_smartgen.select.logits import best_relative_logit, group_softmax
from sglang_smartgen.select.projection import (
    INDEX,
    MATRIX,
    MODES,
    check_width,
    choose_channels,
    project_keys,
    project_query,
    skew_matrix,
)
from sglang_smartgen.select.shape import KVShape, check_samples

POLICIES = ("ratio", "alpha")


class InfinigenSelector(Selector):
    """Metadata is `width` of the head's D numbers a token, in the pool's dtype.

    Options: `mode`, how the numbers are chosen (`projection.py`), and `width`, their share of D,
    are the artifact's. `policy` `ratio` takes the k best; `alpha` takes of those only what is
    within `alpha` of the best scaled logit of some query head of the group.
    """

    name: ClassVar[str] = "infinigen"
    needs_artifact: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"mode": "channels", "width": 0.25, "policy": "ratio", "alpha": 5.0}
    )
    calibrated: ClassVar[frozenset[str]] = frozenset({"mode", "width"})

    def prepare(self) -> None:
        """Take this rank's heads of the artifact."""
        options = self.options
        self.policy, self.alpha = cast(str, options["policy"]), cast(float, options["alpha"])
        self.mode = cast(str, options["mode"])
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; allowed are {', '.join(POLICIES)}")
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0")
        self.metadata_dtype = self.dtype
        self.metadata_width = check_width(
            self.mode, cast(float, options["width"]), self.shape.head_dim
        )
        assert self.artifact is not None
        name = INDEX if self.mode == "channels" else MATRIX
        digest = hashlib.sha256()
        self._choice: dict[int, Tensor] = {}
        for layer in self.artifact.layers():
            choice = self.artifact.tensor(name, layer, self.first_kv_head, self.shape.kv_heads)
            wanted = MODES[self.mode](self.shape, self.metadata_width)
            if choice.shape != wanted:
                raise ValueError(
                    f"the artifact's {name} of layer {layer} is {list(choice.shape)}; "
                    f"it must be {list(wanted)}"
                )
            self._choice[layer] = choice.contiguous()
            digest.update(f"{layer}:".encode() + choice.contiguous().numpy().tobytes())
        self._digest = digest.hexdigest()[:16]

    @classmethod
    def calibrate(
        cls,
        shape: KVShape,
        layer: int,
        samples: list[LayerSample],
        options: Mapping[str, object],
    ) -> dict[str, Tensor]:
        """Return `channels.<layer>` int64 [Hkv, w] or `matrix.<layer>` float32 [Hkv, D, w]."""
        check_samples(shape, samples)
        chosen = cls.resolve(options)
        mode = cast(str, chosen["mode"])
        width = check_width(mode, cast(float, chosen["width"]), shape.head_dim)
        if mode == "channels":
            return {INDEX: choose_channels(shape, samples, width)}
        return {MATRIX: skew_matrix(shape, samples, width)}

    def fingerprint(self) -> str:
        """Return name, version, policy, dtype, shape and a digest of the rank's choice."""
        policy = self.policy if self.policy == "ratio" else f"{self.policy}={self.alpha}"
        return f"infinigen:1:{policy}:{self.metadata_dtype}:{self.shape}:{self._digest}"

    def describe(self) -> str:
        """Return the name with mode, width and count policy."""
        width, dim = self.metadata_width, self.shape.head_dim
        policy = "" if self.policy == "ratio" else f", alpha {self.alpha:g}"
        return f"infinigen ({self.mode}, {width} of {dim} dims{policy})"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return the partial keys [T, Hkv, width] in the pool's dtype."""
        self._check_keys(layer, keys)
        partial = project_keys(self.mode, self._of(layer, keys.device), keys)
        return partial.to(self.metadata_dtype)

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return the softmax of the partial logits, summed over the group.

        The logits keep the model's own scale, though fewer numbers are summed. With policy `alpha`
        the score is the best relative logit of the group, at most 0, which `pick` can cut.
        """
        self._check_score(layer, query, metadata)
        partial = project_query(self.mode, self._of(layer, query.device), query)
        score = group_softmax if self.policy == "ratio" else best_relative_logit
        return score(partial, metadata, self.shape.scaling)

    def pick(self, score: Tensor, k: int) -> Tensor:
        """Return the k best; with policy `alpha` only those above -alpha, -1 behind them.

        Each KV head of each request has its own count, at least 1 (the best logit is 0) and at
        most k: the paper's mean over the heads would depend on the tensor-parallel size.
        """
        index = top_k(score, k)
        if self.policy == "ratio":
            return index
        end = score.shape[-1]
        kept = torch.where(score.gather(-1, index) > -self.alpha, index, end).sort(-1).values
        return torch.where(kept < end, kept, -1)

    def may_use_fewer(self) -> bool:
        """Tell whether the policy cuts rows short."""
        return self.policy != "ratio"

    def _of(self, layer: int, device: torch.device) -> Tensor:
        choice = self._choice.get(layer)
        if choice is None:
            made = ", ".join(map(str, self._choice))
            raise ValueError(f"layer is {layer}; the artifact has layers {made}")
        if choice.device != device:
            choice = self._choice[layer] = choice.to(device)
        return choice
