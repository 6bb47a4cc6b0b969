"""Which blocks of one room go out during prefill, decided as its layers come, and in what order
the rest follows.

All orders but `observed` are decided before prefill. `observed` learns what the prompt's last
queries select in a layer when the last chunk reaches it; so the profile (or an even share) only
says how many blocks each layer gets, and a chunk that is not the last spends its share of them on
the prior's best blocks, to keep the network busy.

K_r rests on two estimates, so an elastic plan bends to what happens: more blocks of the layers that
are there when the network has nothing to do (`more`), fewer when prefill is over first (`give_up`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.core.observe import block_means, observed_importance
from sglang_smartgen.core.orders import mixed_importance, rank_blocks, token_codes


class RoomPlan:
    """The proactive part of one room. Used by one thread at a time.

    importance: float32 [layers, per_layer], the profile, or for `oracle` the counts of this very
    request; rows of dense layers are not read. k: entries that a decode step uses of a KV head.
    k_r: K_r in blocks of this prompt (per_layer = min(blocks, prompt_len) a layer); the dense
    layers are always sent, whatever it is. elastic: K_r was estimated, not asked for. Raises
    ValueError for an order without its importance.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        order: str,
        prompt_len: int,
        blocks: int,
        k_r: int,
        k: int,
        scaling: float,
        seed: int,
        importance: Tensor | None = None,
        elastic: bool = False,
    ) -> None:
        self.elastic = elastic
        self._sparse = geometry.sparse_layers
        self._prompt_len = prompt_len
        self._blocks = blocks
        self._k = k
        self._scaling = scaling
        self._prior = importance
        self._bounds = block_bounds(prompt_len, blocks)
        per_layer = len(self._bounds) - 1
        budget = max(0, k_r - len(geometry.dense_layers) * per_layer)
        self._budget = min(budget, len(self._sparse) * per_layer)
        self._ranking: Tensor | None = None
        if order != "observed" or importance is not None:
            self._ranking = rank_blocks(
                order,
                layers=geometry.layers,
                prompt_len=prompt_len,
                blocks=blocks,
                importance=importance,
                seed=seed,
                sparse_layers=self._sparse,
            )
        self.chosen = torch.zeros(geometry.layers, per_layer, dtype=torch.bool)
        self._observed: Tensor | None = None
        if order == "observed":
            self._observed = torch.zeros(geometry.layers, per_layer)
            self._quota = self._quotas()
        else:
            assert self._ranking is not None
            self.chosen.view(-1)[self._ranking[: self._budget]] = True

    @property
    def looks(self) -> bool:
        """True when `ranges` wants to see the prompt's last queries."""
        return self._observed is not None and not self.whole

    @property
    def whole(self) -> bool:
        """True when every block of every layer is to go out during prefill."""
        return self._budget == len(self._sparse) * self.chosen.shape[1]

    def blocks_of(self, tokens: int) -> int:
        """How many blocks have about so many tokens; at least one."""
        return max(1, tokens * self.chosen.shape[1] // self._prompt_len)

    def ranges(
        self, layer: int, start: int, stop: int, queries: Tensor | None, keys: Tensor
    ) -> list[tuple[int, int]]:
        """What to push now that the tokens `[start, stop)` of `layer` have come.

        queries: [w, q_heads, head_dim], the last of the prompt in this layer, or None when they are
        not known; keys: [stop, kv_heads, head_dim], all so far, or none without queries. Merged,
        ascending token ranges.
        """
        if layer not in self._sparse:
            return [(start, stop)] if start < stop else []
        if self._observed is None:
            return self._merged(self.chosen[layer], start, stop)
        before = self.chosen[layer].clone()
        if stop < self._prompt_len:
            self._spend_share(layer, start, stop)
        else:
            self._observe(layer, queries, keys)
        return self._merged(self.chosen[layer] & ~before, 0, stop)

    def more(self, stops: Sequence[int], count: int) -> dict[int, list[tuple[int, int]]]:
        """Choose the `count` best blocks that are on hand and were not planned.

        stops: for each layer, how many tokens `ranges` has been asked about. Token ranges by layer,
        both ascending.
        """
        ends = torch.tensor(self._bounds[1:])
        ready = (ends[None, :] <= torch.tensor(stops)[:, None]) & ~self.chosen
        ranking = self._ranked()
        best = ranking[ready.view(-1)[ranking]][:count]
        added = torch.zeros_like(self.chosen)
        added.view(-1)[best] = True
        self.chosen |= added
        return {
            layer: self._merged(added[layer], 0, stops[layer])
            for layer in added.any(1).nonzero().flatten().tolist()
        }

    def give_up(self, layer: int, tokens: Tensor) -> None:
        """These tokens of a sparse layer, int64 [n], will not go out: they are left over."""
        blocks = torch.bucketize(tokens, torch.tensor(self._bounds), right=True) - 1
        self.chosen[layer, blocks] = False

    def residual(self) -> Tensor:
        """Order of what is left: int64 codes `layer * prompt_len + token`, best blocks first."""
        ranking = self._ranked()
        left = ranking[~self.chosen.view(-1)[ranking]]
        return token_codes(left, self._prompt_len, self._blocks)

    def _ranked(self) -> Tensor:
        """All blocks of sparse layers, best first, by what is known now."""
        if self._observed is None:
            assert self._ranking is not None
            return self._ranking
        return rank_blocks(
            "observed",
            layers=self.chosen.shape[0],
            prompt_len=self._prompt_len,
            blocks=self._blocks,
            importance=self._prior,
            observed=self._observed,
            sparse_layers=self._sparse,
        )

    def _quotas(self) -> dict[int, int]:
        """Blocks that each sparse layer may push, as the prior's best K_r blocks spread."""
        if self._ranking is not None:
            rows = self._ranking[: self._budget] // self.chosen.shape[1]
            counts = torch.bincount(rows, minlength=self.chosen.shape[0])
            return {layer: int(counts[layer]) for layer in self._sparse}
        share, rest = divmod(self._budget, max(1, len(self._sparse)))
        return {layer: share + (i < rest) for i, layer in enumerate(self._sparse)}

    def _spend_share(self, layer: int, start: int, stop: int) -> None:
        """A chunk that is not the last: its share of the quota, on the prior's best blocks."""
        share = self._quota[layer] * (stop - start) // self._prompt_len
        bounds = torch.tensor(self._bounds)
        inside = (bounds[:-1] >= start) & (bounds[1:] <= stop)
        score = torch.zeros(len(inside)) if self._prior is None else self._prior[layer]
        self._choose(layer, score, inside, share)

    def _observe(self, layer: int, queries: Tensor | None, keys: Tensor) -> None:
        """The last chunk: what is left of the quota, on what the last queries select."""
        assert self._observed is not None
        prior = None if self._prior is None else self._prior[layer]
        if queries is not None:
            tokens = observed_importance(queries, keys, self._k, self._scaling)
            self._observed[layer] = block_means(tokens, self._bounds)
            score = mixed_importance(prior, self._observed[layer])
        else:
            score = torch.zeros(self.chosen.shape[1]) if prior is None else prior
        left = max(0, self._quota[layer] - int(self.chosen[layer].sum()))
        self._choose(layer, score, torch.ones_like(self.chosen[layer]), left)

    def _choose(self, layer: int, score: Tensor, allowed: Tensor, count: int) -> None:
        """Add the `count` best allowed blocks of the layer that are not chosen yet."""
        allowed = allowed & ~self.chosen[layer]
        ranked = torch.where(allowed, score.to(torch.float32), -torch.inf)
        best = torch.sort(ranked, descending=True, stable=True).indices
        self.chosen[layer, best[: min(count, int(allowed.sum()))]] = True

    def _merged(self, chosen: Tensor, start: int, stop: int) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for m in chosen.nonzero().flatten().tolist():
            first, last = max(self._bounds[m], start), min(self._bounds[m + 1], stop)
            if first >= last:
                continue
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
        return ranges
