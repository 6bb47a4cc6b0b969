"""What each operator computes, in plain torch on any device: slow, obvious, in float64 or exact.

The names and arguments are those of `sglang_smartgen.triton_kernels`. The split operators are the
five-operator torch version of Algorithm 1, with which `scripts/gpu_check.py` compares the fused
one; `reference/split.py` has them as loops.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOCAL, REMOTE = 1, 2


def mask_gather(mask: Tensor, index: Tensor) -> Tensor:
    """Operator 1: int8 [B, H, k]."""
    if mask.dim() == 2:
        mask = mask.unsqueeze(1)
    length = mask.shape[-1]
    if length == 0:
        return torch.zeros_like(index, dtype=torch.int8)
    mask = mask.expand(*index.shape[:2], length)
    inside = (index >= 0) & (index < length)
    return mask.gather(2, index.clamp(0, length - 1)) * inside


def lane(index: Tensor, index_mask: Tensor, value: int) -> tuple[Tensor, Tensor]:
    """Operators 2 and 3: the entries whose mask is `value`, -1 padded, and their count."""
    chosen = index_mask == value
    order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True)
    found = torch.where(chosen, index, -1).gather(2, order)
    return found, chosen.sum(-1)


def split_index(index: Tensor, index_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both lanes in the order of `Lanes`."""
    local, local_count = lane(index, index_mask, LOCAL)
    remote, remote_count = lane(index, index_mask, REMOTE)
    return local, remote, local_count, remote_count


def reorder_descending(index: Tensor, index_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Operators 4 and 5: remote, local, padding; and the columns they had."""
    present = (index_mask == LOCAL) | (index_mask == REMOTE)
    value = torch.where(present, index_mask, 0)
    order = torch.argsort(value, dim=-1, descending=True, stable=True)
    return torch.where(present, index, -1).gather(2, order), order


def split_and_reorder(index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operators 1 to 5, one after the other, in the order of `SplitIndex`."""
    index_mask = mask_gather(mask, index)
    _, _, local_count, remote_count = split_index(index, index_mask)
    reordered, order = reorder_descending(index, index_mask)
    return reordered, order, remote_count, local_count


def gather_rows(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of every slot, zeros outside the pool."""
    size, heads = keys.shape[:2]
    inside = (slots >= 0) & (slots < size)
    if size == 0:
        none = keys.new_zeros((*slots.shape, keys.shape[2]), device=slots.device)
        return none, none
    place = slots.clamp(0, size - 1).to(keys.device)
    head = torch.arange(heads, device=keys.device)[:, None]
    found = (pool[place, head].to(slots.device) for pool in (keys, values))
    keys_out, values_out = (rows.masked_fill(~inside[..., None], 0) for rows in found)
    return keys_out, values_out


def hash_encode(
    x: Tensor, matrix: Tensor, centre: Tensor | None = None, norm: bool = False
) -> Tensor:
    """Packed signs of the rounded vectors' products, and their lengths."""
    x = x.float() if centre is None else x.float() - centre
    unit = x.abs().amax(-1, keepdim=True) / 255
    unit = torch.where(unit > 0, unit, 1.0)
    whole = torch.round(x / unit).double()
    above = torch.einsum("thd,hdr->thr", whole, matrix.double()) > 0
    weight = 1 << torch.arange(32, device=x.device)
    words = (above.unflatten(-1, (matrix.shape[2] // 32, 32)) * weight).sum(-1).to(torch.int32)
    if not norm:
        return words
    length = whole.square().sum(-1).sqrt().float() * unit[..., 0]
    return torch.cat((words, length.view(torch.int32)[..., None]), dim=-1)


def _rows(pool: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, N, ...] and which of them are there, bool [B, N]."""
    if slots is None:
        slots = torch.arange(pool.shape[0], device=pool.device)[None]
    inside = (slots >= 0) & (slots < pool.shape[0])
    if pool.shape[0] == 0:
        return pool.new_zeros((*slots.shape, *pool.shape[1:])), inside
    return pool[slots.clamp(0, pool.shape[0] - 1)], inside


def hash_score(code: Tensor, metadata: Tensor, bits: int, slots: Tensor | None = None) -> Tensor:
    """`norm_n * sum_g (1 - 2 * hamming / bits)`, with the order of operations of the codes."""
    rows, inside = _rows(metadata, slots)  # [B, N, H, w + 1]
    rows = rows.movedim(1, 2)
    unlike = rows[:, :, :, None, :-1] ^ code[:, :, None]  # [B, H, N, G, w]
    distance = sum(((unlike >> bit) & 1).sum((-1, -2)) for bit in range(32))
    similarity = (code.shape[2] * bits - 2 * distance).float()
    score = rows[..., -1].contiguous().view(torch.float32) * (similarity / bits)
    return score.masked_fill(~inside[:, None], -torch.inf)


def partial_score(
    query: Tensor, keys: Tensor, scaling: float, slots: Tensor | None = None
) -> Tensor:
    """The group's summed softmax, in float64."""
    rows, inside = _rows(keys, slots)
    logits = scaling * torch.einsum("bhgp,bnhp->bhgn", query.double(), rows.double())
    gone = ~inside[:, None]
    weights = logits.masked_fill(gone[:, :, None], -torch.inf).softmax(-1)
    return weights.sum(2).masked_fill(gone, -torch.inf)


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_slots: Tensor,
    scaling: float,
) -> Tensor:
    """Attention over gathered rows and tail, in float64; zeros where there is no row at all."""
    heads = index.shape[1]
    more_keys, inside = _rows(tail_keys, tail_slots)
    more_values, _ = _rows(tail_values, tail_slots)
    present = torch.cat((index >= 0, inside[:, None].expand(-1, heads, -1)), dim=2)
    all_keys = torch.cat((keys, more_keys.movedim(1, 2)), dim=2).double()
    all_values = torch.cat((values, more_values.movedim(1, 2)), dim=2).double()
    # Padding may hold anything, NaN too.
    all_keys = all_keys.masked_fill(~present[..., None], 0)
    all_values = all_values.masked_fill(~present[..., None], 0)
    grouped = query.double().unflatten(1, (heads, -1))
    logits = scaling * torch.einsum("bhgd,bhnd->bhgn", grouped, all_keys)
    weights = logits.masked_fill(~present[:, :, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(~present[:, :, None], 0)  # no row at all: softmax is NaN
    return torch.einsum("bhgn,bhnd->bhgd", weights, all_values).flatten(1, 2)
