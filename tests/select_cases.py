"""Every selector, made for a small random model: artifacts of it, keys and queries."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_smartgen.select import (
    Artifact,
    KVShape,
    LayerSample,
    Manifest,
    Selector,
    make_selector,
    selector_class,
)

WHOLE = KVShape(layers=4, q_heads=8, kv_heads=4, head_dim=32, scaling=32**-0.5)
LAYERS = (2, 3)
CASES: dict[str, tuple[str, dict[str, object] | None, dict[str, object]]] = {
    # name of the case: selector, options of its calibration (None: no artifact), run-time options
    "exact": ("exact", None, {}),
    "quest": ("quest", None, {}),
    "streaming": ("streaming", None, {}),
    "hata-random": ("hata", None, {"bits": 64}),
    "hata-trained": ("hata", {"bits": 64, "steps": 3}, {}),
    "hata-hamming": ("hata", None, {"bits": 64, "score": "hamming"}),
    "hata-paper": (
        "hata",
        {"bits": 32, "steps": 2, "score": "hamming", "objective": "paper"},
        {},
    ),
    "infinigen-channels": ("infinigen", {}, {}),
    "infinigen-skew": ("infinigen", {"mode": "skew", "width": 0.5}, {}),
    "infinigen-alpha": ("infinigen", {"width": 0.5}, {"policy": "alpha", "alpha": 2}),
}


def keys_of(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[T, Hkv, D] around a mean, with channels of different size, as post-RoPE keys are."""
    made = torch.Generator().manual_seed(seed)
    heads, dim = WHOLE.kv_heads, WHOLE.head_dim
    size = torch.linspace(0.2, 3, dim)
    noise = torch.randn(tokens, heads, dim, generator=made)
    mean = torch.randn(heads, dim, generator=torch.Generator().manual_seed(99))
    return ((noise + 2 * mean) * size).to(dtype)


def queries_of(tokens: int, seed: int) -> torch.Tensor:
    """[T, Hq, D]."""
    made = torch.Generator().manual_seed(seed + 1000)
    return torch.randn(tokens, WHOLE.q_heads, WHOLE.head_dim, generator=made)


def artifact_for(
    name: str,
    shape: KVShape,
    samples: dict[int, list[LayerSample]],
    options: dict[str, object],
) -> Artifact:
    """An artifact of the selector `name` with the layers of `samples`."""
    kind = selector_class(name)
    tensors = {
        f"{key}.{layer}": value
        for layer, texts in samples.items()
        for key, value in kind.calibrate(shape, layer, texts, options).items()
    }
    manifest = Manifest(
        selector=name,
        model_hash="m",
        layers=shape.layers,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        parameters=kind.resolve(options),
        text_hash="t",
        created="2026-01-01T00:00:00Z",
    )
    return Artifact(manifest, tensors)


@functools.cache
def artifact_of(case: str) -> Artifact | None:
    """The artifact of a case, calibrated on two random texts."""
    name, options, _ = CASES[case]
    if options is None:
        return None
    samples = [LayerSample(queries_of(n, n), keys_of(n, n)) for n in (90, 60)]
    return artifact_for(name, WHOLE, dict.fromkeys(LAYERS, samples), options)


def selector_of(
    case: str,
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
    artifact: Artifact | None = None,
) -> Selector:
    """The selector of one of `ranks` tensor-parallel ranks."""
    heads = WHOLE.kv_heads // ranks
    shape = KVShape(WHOLE.layers, WHOLE.q_heads // ranks, heads, WHOLE.head_dim, WHOLE.scaling)
    name, _, options = CASES[case]
    return make_selector(
        name,
        shape,
        dtype,
        artifact=artifact or artifact_of(case),
        first_kv_head=rank * heads,
        options=options,
    )


def encode(selector: Selector, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Metadata of a whole prompt."""
    anchor = keys[: selector.anchor_tokens] if selector.anchor_tokens else None
    return selector.encode(layer, keys, anchor)


def selections(case: str, rank: int, ranks: int, artifact: Artifact | None) -> torch.Tensor:
    """Scores (their bits) and picks of a rank's heads: int64 [layers * steps, Hkv, T + k]."""
    selector = selector_of(case, rank, ranks, artifact=artifact)
    heads = WHOLE.kv_heads // ranks
    own = slice(rank * heads, (rank + 1) * heads)
    out = []
    for layer in LAYERS:
        metadata = encode(selector, layer, keys_of(157, layer)[:, own].contiguous())
        for query in queries_of(3, layer).view(3, WHOLE.kv_heads, -1, WHOLE.head_dim)[:, own]:
            score = selector.score(layer, query, metadata)
            out.append(torch.cat((score.view(torch.int32).long(), selector.pick(score, 19)), 1))
    return torch.stack(out)


def gloo_rank(
    rank: int, ranks: int, folder: str, artifacts: dict[str, Artifact | None], threads: int
) -> None:
    """One process of a gloo group: gather all ranks' selections; rank 0 saves them."""
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=180),
    )
    try:
        whole = {}
        for case, artifact in artifacts.items():
            mine = selections(case, rank, ranks, artifact)
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(parts, mine)
            whole[case] = torch.cat(parts, dim=1)
        if rank == 0:
            torch.save(whole, f"{folder}/selections.pt")
    finally:
        dist.destroy_process_group()
