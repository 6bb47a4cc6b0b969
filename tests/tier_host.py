"""SGLang's own tree cache with a host tier on a CPU, and our HostTier on it; no servers.

`python tier_host.py MODEL POLICY LAYOUT CORE` goes through the life of two prompts (write policy,
layout of the host tier, tree core `rust` or `python`) and prints `ok`. An assertion that fails ends
it: the checks are here, since every one of them needs the tree.
"""

from __future__ import annotations

import os
import sys
from array import array
from types import SimpleNamespace
from typing import Any

LAYERS, HEADS, DIM, DEVICE_TOKENS = 3, 2, 8, 96
PROMPT = list(range(100, 140))
OTHER = [*PROMPT[:16], *range(200, 224)]  # forks off in the middle of a node


class World:
    """A tree with both tiers. kv: what a token's KV must be, by token id."""

    def __init__(self, model: str, policy: str, layout: str, core: str) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = core
        from sglang_smartgen.engine import cpu_host

        argv = cpu_host.prepare_environment(
            [
                *("--model-path", model, "--device", "cpu", "--attention-backend", "torch_native"),
                *("--skip-tokenizer-init", "--page-size", "1", "--enable-hierarchical-cache"),
                *("--hicache-ratio", "2", "--hicache-write-policy", policy),
                *("--hicache-mem-layout", layout, "--disable-overlap-schedule"),
            ]
        )
        if layout == "page_first_direct":
            argv += ["--hicache-io-backend", "direct"]
        import torch
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, spawn_world_rank
        from sglang.srt.server_args import prepare_server_args

        args = prepare_server_args(argv)
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        from sglang.srt.mem_cache import memory_pool, unified_radix_cache
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.pool_host import base, common
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        from sglang_smartgen.core.geometry import KVGeometry
        from sglang_smartgen.engine.cpu_host.host_register import leave_pageable
        from sglang_smartgen.engine.cpu_host.host_tier import backup_layers, load_layer
        from sglang_smartgen.engine.host_tier import HostTier

        common._cuda_host_register = leave_pageable
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # SGLang's 10 GB are for a real pool
        MHATokenToKVPoolHost.load_to_device_per_layer = load_layer
        MHATokenToKVPoolHost.backup_from_device_all_layer = backup_layers
        named: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self.torch = torch
        self.pool = memory_pool.MHATokenToKVPool(
            DEVICE_TOKENS,
            1,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            enable_memory_saver=False,
            **named,
        )
        self.slots = TokenToKVPoolAllocator(
            DEVICE_TOKENS, kvcache=self.pool, need_sort=False, **named
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=memory_pool.ReqToTokenPool(4, 128, "cpu", False),
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
        with get_parallel().override(attn_tp_size=1):
            self.cache = unified_radix_cache.UnifiedRadixCache(params)
            self.cache.init_hicache(args, params)
        self.tier = HostTier(self.cache, KVGeometry(LAYERS, HEADS, DIM, torch.float32))
        self.host = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        made = torch.Generator().manual_seed(1)
        self.kv = torch.randn((256, 2, LAYERS, HEADS, DIM), generator=made)

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def compute(self, tokens: list[int]) -> Any:
        """Prefill a prompt as SGLang does, and put it in the tree; its last node."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        node, prefix = self.match(tokens)
        have = self.cache.path_device_indices(node)[:prefix]
        new = self.slots.alloc(len(tokens) - prefix)
        assert new is not None
        for layer in range(LAYERS):
            self.pool.k_buffer[layer][new] = self.kv[tokens[prefix:], 0, layer]
            self.pool.v_buffer[layer][new] = self.kv[tokens[prefix:], 1, layer]
        slots = self.torch.cat((have, new))
        self.cache.insert(InsertParams(key=self.key(tokens), value=slots, prev_prefix_len=prefix))
        return self.match(tokens)[0]

    def match(self, tokens: list[int]) -> tuple[Any, int]:
        """The deepest node with KV on the device, and how many tokens that is."""
        found = self.matched(tokens)
        return found.last_device_node, found.device_prefix_len

    def matched(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def bring_back(self, tokens: list[int]) -> tuple[Any, int]:
        """What a request does whose prefix is on the host only."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = self.matched(tokens)
        req = SimpleNamespace(
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
            rid="r",
        )
        loaded, node = self.cache.init_load_back(
            InitLoadBackParams(found.best_match_node, found.host_hit_length, req=req)
        )
        self.cache.ready_to_load_host_cache()
        return node, found.device_prefix_len + loaded

    def evict_device(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=DEVICE_TOKENS))
        self.cache.writing_check(write_back=True)

    def acknowledged(self) -> None:
        self.cache.check_hicache_events()

    def right(self, pages: Any, tokens: list[int]) -> bool:
        """Whether pages hold these tokens' KV."""
        there = pages.memory[:, :, pages.slots]
        return self.torch.equal(there, self.kv[tokens].permute(1, 2, 0, 3, 4))

    def on_device(self, tokens: list[int]) -> bool:
        node, prefix = self.match(tokens)
        slots = self.cache.path_device_indices(node)[:prefix]
        there = self.torch.stack(
            [
                self.torch.stack([layer[slots] for layer in side])
                for side in (self.pool.k_buffer, self.pool.v_buffer)
            ]
        )
        return prefix == len(tokens) and self.torch.equal(
            there, self.kv[tokens].permute(1, 2, 0, 3, 4)
        )

    def squeeze(self) -> None:
        """Everything that SGLang may evict from the host goes, and other bytes come there."""
        self.cache.evict_host(self.host.size)
        got = self.host.alloc(self.host.available_size())
        if got is not None and len(got):
            self.tier.memory[:, :, got] = 5.0
            self.host.free(got)


def backed_up(world: World, policy: str) -> Any:
    """The prompt's last node once the prompt is on the host."""
    node = world.compute(PROMPT)
    assert world.tier.lend(node, len(PROMPT)) is None  # not there, or under way
    if policy == "write_through_selective":  # the second use brings it to the host
        world.acknowledged()
        node = world.compute(PROMPT)
    if policy == "write_back":  # only what leaves the device gets there
        world.evict_device()
        node, prefix = world.bring_back(PROMPT)
        assert prefix == len(PROMPT)
    world.acknowledged()
    return node


def main() -> None:
    """Go through it all."""
    model, policy, layout, core = sys.argv[1:]
    world = World(model, policy, layout, core)
    tier = world.tier
    node = backed_up(world, policy)
    pages = tier.lend(node, len(PROMPT))
    assert pages is not None and pages.count == len(PROMPT) and world.right(pages, PROMPT)
    assert tier.lend(node, 0) is None
    whole = world.host.available_size() + len(PROMPT)
    # Two prompts share the first pages: the node is split while it is lent.
    other = world.compute(OTHER)
    world.acknowledged()
    shared = tier.lend(other, len(OTHER) - 1)
    assert shared is not None and world.right(shared, OTHER[: shared.count])
    assert shared.count >= 16
    # SGLang may evict neither, on the host or from the device.
    world.squeeze()
    world.evict_device()
    world.squeeze()
    assert world.right(pages, PROMPT) and world.right(shared, OTHER[: shared.count])
    # What was only on the host comes back right.
    _, prefix = world.bring_back(PROMPT)
    world.acknowledged()
    assert prefix == len(PROMPT) and world.on_device(PROMPT)
    world.squeeze()
    assert world.right(pages, PROMPT)
    # The loans end, and every page can be evicted.
    pages.give_back()
    tier.settle()
    world.evict_device()
    world.squeeze()
    assert world.right(shared, OTHER[: shared.count])
    shared.give_back()
    tier.settle()
    world.squeeze()
    world.evict_device()
    world.squeeze()
    assert (tier.lent, world.host.available_size()) == (0, whole)
    # A flush under two loans of the same pages.
    node = backed_up(world, policy)
    first, second = tier.lend(node, len(PROMPT)), tier.lend(node, len(PROMPT))
    assert first is not None and second is not None
    world.cache.reset()
    world.slots.clear()
    world.squeeze()
    assert world.host.available_size() == whole - len(PROMPT)
    first.give_back()
    tier.settle()
    world.cache.reset()
    world.slots.clear()
    world.squeeze()
    assert world.right(second, PROMPT)
    second.give_back()
    tier.settle()
    assert (tier.lent, world.host.available_size()) == (0, whole)
    backed_up(world, policy)
    print("ok")


if __name__ == "__main__":
    main()
