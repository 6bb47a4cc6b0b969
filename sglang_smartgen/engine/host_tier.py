"""The host tier of P's hierarchical cache, as far as the store borrows pages of it.

Used by the scheduler thread alone, which owns SGLang's tree; only a loan is ended by whichever
thread frees its entry, through a queue that `settle` empties. SGLang evicts no page that is lent:
every node of the path is locked on the host, since with write_back SGLang frees host copies of
inner nodes too. A node whose copy to the host is still under way is not lent.

SGLang flushes its cache while rooms of ended requests are still served. Locks end with the tree, so
pages that are lent are then taken out of the emptied pool until their loans have ended.
"""

from __future__ import annotations

import queue
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.engine.refusals import TIER_LAYOUTS
from sglang_smartgen.transfer.tiered_store import Pages
from sglang_smartgen.transfer.transport import Region


class Loan:
    """Pages that one entry reads. locks: SGLang's receipts by node; None once the tree is gone."""

    def __init__(self, slots: Tensor, locks: list[tuple[int, Any]]) -> None:
        self.slots = slots
        self.locks: list[tuple[int, Any]] | None = locks


class HostTier:
    """Lends pages of the tree cache of one prefill rank."""

    def __init__(self, cache: Any, geometry: KVGeometry) -> None:
        """cache: SGLang's UnifiedRadixCache. Raises ConfigError for a tier that cannot be read."""
        self._cache = cache
        self._pool = cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        self.memory = tier_memory(self._pool, geometry)
        self._loans: set[Loan] = set()
        self._ended: queue.SimpleQueue[Loan] = queue.SimpleQueue()
        self._kept: Counter[int] = Counter()  # loans of a page that no tree knows
        self._reset = cache.reset
        cache.reset = self._flush

    @property
    def region(self) -> Region:
        """All of the tier, for registration with a transport."""
        buffer = self._pool.kv_buffer
        return Region(buffer.data_ptr(), buffer.nbytes)

    def lend(self, node: Any, prefix_len: int) -> Pages | None:
        """The pages of the first tokens of a prefix of `prefix_len` tokens that ends at `node`.

        As many as are in the host tier from the first token on; None: there are none.
        """
        tree = self._cache.tree_core
        under_way = {
            named
            for pending in self._cache.ongoing_write_through.values()
            for named in pending.publish_node_ids
        }
        slots: list[Tensor] = []
        locks: list[tuple[int, Any]] = []
        for step in tree.collect_path_info([node])[0]:
            spec = None
            if step.path_end <= prefix_len and step.node_id not in under_way:
                spec = tree.build_storage_backup_spec(step.node_id, False)
            if spec is None:
                break
            slots.append(spec.host_value.cpu())
            receipt = self._cache.inc_host_lock_ref(step.node_id).to_dec_params()
            locks.append((step.node_id, receipt))
        if not locks:
            return None
        loan = Loan(torch.cat(slots), locks)
        self._loans.add(loan)
        return Pages(self.memory, loan.slots, lambda: self._ended.put(loan))

    def settle(self) -> None:
        """Let SGLang have the pages again whose entries are gone."""
        while not self._ended.empty():
            loan = self._ended.get()
            self._loans.discard(loan)
            if loan.locks is None:
                self._give_up(loan.slots)
                continue
            for node, receipt in reversed(loan.locks):
                self._cache.dec_host_lock_ref(node, receipt)

    @property
    def lent(self) -> int:
        """Loans that have not ended."""
        return len(self._loans)

    def _flush(self) -> None:
        """SGLang's reset, after which no other prompt gets what is lent."""
        self.settle()
        self._reset()
        self._kept.clear()
        for loan in self._loans:
            loan.locks = None
            self._kept.update(loan.slots.tolist())
        if self._kept:
            taken = torch.tensor(sorted(self._kept))
            with self._pool.lock:
                self._pool.slot_used[taken] = True
                self._pool.free_slots = (~self._pool.slot_used).nonzero().flatten()

    def _give_up(self, slots: Tensor) -> None:
        self._kept.subtract(slots.tolist())
        free = [slot for slot in slots.tolist() if self._kept[slot] == 0]
        for slot in free:
            del self._kept[slot]
        self._pool.free(torch.tensor(free, dtype=torch.int64))


def tier_memory(pool: Any, geometry: KVGeometry) -> Tensor:
    """SGLang's MHATokenToKVPoolHost as [2, layers, pages, kv_heads, head_dim], a token a page.

    Raises ConfigError with one sentence for a pool of another layout or shape.
    """
    buffer, layout = pool.kv_buffer, getattr(pool, "layout", None)
    if layout == "layer_first":
        view = buffer
    elif layout == "page_first":
        view = buffer.transpose(1, 2)
    elif layout == "page_first_direct" and pool.page_size == 1:
        view = buffer.squeeze(3).transpose(1, 2)
    else:
        raise ConfigError(
            f"--hicache-mem-layout is {layout} with pages of {pool.page_size} tokens; SmartGen "
            f"allows {' or '.join(TIER_LAYOUTS)} with pages of one, since a token's row must be "
            "contiguous"
        )
    g = geometry
    shape, wanted = list(view.shape), [2, g.layers, view.shape[2], g.kv_heads, g.head_dim]
    if shape != wanted or view.dtype != g.dtype:
        raise ConfigError(
            f"SmartGen cannot read the host tier of this cache: it is {shape} of {view.dtype}; "
            f"allowed is {wanted} of {g.dtype}"
        )
    return view
