"""One tensor-parallel rank of a small Qwen3: a dense prefill, then greedy steps with selection.

The layers are transformers' own, cut to the rank's heads. The ranks meet in one place only, the
sum of their parts of the attention output; norms, MLP, embedding and head are on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import select_cases as cases
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_smartgen.calibrate.model import Layer, LayeredModel
from sglang_smartgen.calibrate.walk import walk
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.engine.ranks import GlooRanks
from sglang_smartgen.report.decode_steps import PromptAttention, StepAttention
from sglang_smartgen.select import Artifact, KVShape, Selector, budget, make_selector

STEPS = 12
RATIO = 0.2


class Arm(NamedTuple):
    """A selector and how it is made; `calibration` None: without an artifact."""

    selector: str
    calibration: dict[str, object] | None = None
    options: Mapping[str, object] = {}
    lookahead: bool = False
    ignores_place: bool = False  # the fault that the test must see: every rank is the first one


ARMS = {
    "exact": Arm("exact"),
    "hata-random": Arm("hata", options={"bits": 64}),
    "hata-trained": Arm("hata", {"bits": 64, "steps": 3}),
    "infinigen-channels": Arm("infinigen", {"mode": "channels", "width": 0.5}),
    "infinigen-skew": Arm("infinigen", {"mode": "skew", "width": 0.5}),
    "infinigen-lookahead": Arm("infinigen", {"mode": "skew", "width": 0.5}, lookahead=True),
}
FAULTY = {
    name: ARMS[name]._replace(ignores_place=True)
    for name in ARMS
    if name != "exact"  # which has nothing of its own for a head
}


class Run(NamedTuple):
    """What the greedy steps gave: tokens, the first from the prompt, and the entries used."""

    tokens: list[int]
    picks: Tensor  # int64 [steps, sparse layers, Hkv of the rank, k]


class RankModel(LayeredModel):
    """The model with the query and KV heads of one rank."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        super().__init__(folder)
        self._rank, self._ranks = rank, ranks
        whole = self.shape
        heads = whole.q_heads // ranks, whole.kv_heads // ranks
        self.shape = KVShape(whole.layers, *heads, whole.head_dim, whole.scaling)

    def layer(self, index: int) -> Layer:
        """Load a layer, cut to the rank's heads."""
        layer = super().layer(index)
        attention = layer._module.self_attn
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            linear = getattr(attention, name)
            part = linear.weight.data.chunk(self._ranks, dim)[self._rank]
            linear.weight.data = part.contiguous()
        if self._ranks > 1:
            attention.o_proj.register_forward_hook(_sum_of_ranks)
        return layer

    def selector(self, arm: Arm, artifact: Artifact | None) -> Selector:
        """Make the selector of the rank's heads."""
        return make_selector(
            arm.selector,
            self.shape,
            artifact=artifact,
            first_kv_head=0 if arm.ignores_place else self._rank * self.shape.kv_heads,
            options=arm.options,
        )


class Collectives(TorchDispatchMode):
    """The names of the collectives called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Decoder:
    """A model behind a prompt that it has prefilled."""

    @torch.no_grad()
    def __init__(self, model: LayeredModel, prompt: list[int]) -> None:
        self._model, self._length = model, len(prompt)
        self._words = model.embed(list(range(model.config.vocab_size)))
        self._layers = [model.layer(index) for index in range(model.layers)]
        self._prompt = [PromptAttention(None) for _ in self._layers]
        hidden = self._words[prompt]
        for layer, attention in zip(self._layers, self._prompt, strict=True):
            hidden = layer.forward(hidden, attention)
        self._first = self._best(hidden)

    @torch.no_grad()
    def run(self, selector: Selector | None, lookahead: bool = False, steps: int = STEPS) -> Run:
        """Decode greedily; without a selector every entry of the prompt is used."""
        caches = [copy.copy(attention) for attention in self._prompt]
        chooser = Chooser(selector, caches) if selector else None
        tokens, picks = [self._first], []
        for position in range(self._length, self._length + steps):
            x = before = self._words[tokens[-1:]]
            for layer, cache in zip(self._layers, caches, strict=True):
                attend = CachedAttention(cache, layer.index, chooser)
                if lookahead and layer.index >= DENSE_LAYERS:
                    attend.query = layer.query(before, position)
                before, x = x, layer.forward(x, attend, position)
                if attend.picked is not None:
                    picks.append(attend.picked)
            tokens.append(self._best(x))
        stacked = torch.stack(picks).unflatten(0, (steps, -1)) if picks else torch.empty(0)
        return Run(tokens, stacked)

    def _best(self, hidden: Tensor) -> int:
        return int(self._model.logits(hidden[-1:]).argmax())


class Chooser:
    """Chooses entries of the prompt in the sparse layers, from metadata made once."""

    def __init__(self, selector: Selector, caches: list[PromptAttention]) -> None:
        self._selector, self._count = selector, budget(caches[0].keys.shape[1], RATIO)
        self._metadata = {
            layer: cases.encode(selector, layer, cache.keys.transpose(0, 1))
            for layer, cache in enumerate(caches)
            if layer >= DENSE_LAYERS
        }

    def __call__(self, layer: int, query: Tensor) -> Tensor | None:
        """int64 [Hkv, k] for a query [1, Hq, D]; None in a dense layer."""
        if layer not in self._metadata:
            return None
        grouped = query[0].unflatten(0, (self._selector.shape.kv_heads, -1))
        score = self._selector.score(layer, grouped, self._metadata[layer])
        return self._selector.pick(score, self._count)

    def mask(self, picked: Tensor, length: int) -> Tensor:
        """bool [Hkv, 1, length]: the picked entries of the prompt and all tokens behind it."""
        prompt = next(iter(self._metadata.values())).shape[0]
        seen = torch.ones(picked.shape[0], length, dtype=torch.bool)
        seen[:, :prompt] = False
        return seen.scatter(1, picked, True)[:, None]


class CachedAttention:
    """Attention of one new token, which then joins the cache of its layer."""

    def __init__(self, cache: PromptAttention, layer: int, chooser: Chooser | None) -> None:
        self._cache, self._layer, self._chooser = cache, layer, chooser
        self.query: Tensor | None = (
            None  # [1, Hq, D] of the lookahead; None: choose by the true one
        )
        self.picked: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, see `calibrate.model.Attend`."""
        cache, chosen = self._cache, None
        if self._chooser:
            asked = query.transpose(0, 1) if self.query is None else self.query
            self.picked = self._chooser(self._layer, asked)
        if self._chooser and self.picked is not None:
            chosen = self._chooser.mask(self.picked, cache.keys.shape[1])
        out = StepAttention(cache, None, chosen)(query, key, value, scaling)
        cache.keys = torch.cat((cache.keys, key), dim=1)
        cache.values = torch.cat((cache.values, value), dim=1)
        return out


def artifacts_of(model: LayeredModel, text: list[int]) -> dict[str, Artifact]:
    """The artifact of every arm that has one, of the whole model."""
    samples = {
        step.layer: step.samples
        for step in walk(model, [model.embed(text)])
        if step.layer >= DENSE_LAYERS
    }
    return {
        name: cases.artifact_for(arm.selector, model.shape, samples, arm.calibration)
        for name, arm in ARMS.items()
        if arm.calibration is not None
    }


def fork_ranks(_: int, ranks: int, folder: Path, *arguments: Any) -> None:
    """The body of one fresh process, without threads: import transformers once, then fork."""
    torch.set_num_threads(1)
    RankModel(folder, 0, ranks)  # imports what a rank needs, most of a rank's time otherwise
    arguments = (ranks, folder, *arguments)
    torch.multiprocessing.start_processes(gloo_rank, arguments, nprocs=ranks, start_method="fork")


def gloo_rank(
    rank: int, ranks: int, folder: Path, prompt: list[int], artifacts: dict[str, Artifact]
) -> None:
    """One process of a gloo group; saves its runs, the names of their collectives, faulty runs,
    and what the ranks have said to each other."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=180),
    )
    try:
        model = RankModel(folder, rank, ranks)
        with Collectives() as called:
            decoder = Decoder(model, prompt)
            runs = {
                name: decoder.run(model.selector(arm, artifacts.get(name)), arm.lookahead)
                for name, arm in ARMS.items()
            }
        faulty = {
            name: decoder.run(model.selector(arm, artifacts.get(name)), arm.lookahead, steps=1)
            for name, arm in FAULTY.items()
        }
        ours = GlooRanks(dist.group.WORLD)
        said = ours.least([rank, 5 - rank, 7]), ours.texts("é" * (3 * rank) + str(rank))
        torch.save((runs, called.names, faulty, said), rank_file(folder, rank))
    finally:
        dist.destroy_process_group()


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank saves."""
    return folder / f"rank-{rank}.pt"


def _sum_of_ranks(module: Any, arguments: Any, part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part
