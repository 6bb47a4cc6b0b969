"""Stand-in for `sgl_kernel` on a host without a GPU, where its CUDA build cannot be loaded.

It offers the names that SGLang 0.5.23 imports at module level on such a host, so that the imports
succeed. Serving Llama, Qwen and Gemma models calls none of them (they belong to speculative
decoding and to moving KV slots); one that is called anyway says so.
"""

from typing import Any, NoReturn

IMPORTED_BY = {
    "assign_draft_cache_locs_contiguous_cpu": "sglang.kernels.ops.speculative.cache_locs",
    "assign_extend_cache_locs_cpu": "sglang.kernels.ops.speculative.cache_locs",
    "assign_req_to_token_pool_cpu": "sglang.srt.mem_cache.allocation",
    "build_tree_kernel_efficient_cpu": "sglang.kernels.ops.speculative.spec_tree",
    "copy_all_layer_kv_cache_cpu": "sglang.kernels.ops.kvcache.cache_move",
    "fill_accept_out_cache_loc_cpu": "sglang.kernels.ops.speculative.eagle",
    "fill_bonus_tokens_cpu": "sglang.kernels.ops.speculative.eagle",
    "rotate_input_ids_cpu": "sglang.kernels.ops.speculative.multi_layer_eagle",
    "verify_tree_greedy_cpu": "sglang.kernels.ops.speculative.spec_tree",
}


class KernelUnavailableError(RuntimeError):
    """A compiled kernel was called on a host that has none."""


def _stand_in(name: str) -> Any:
    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise KernelUnavailableError(
            f"sgl_kernel.{name} was called on a host without a GPU, where SmartGen puts a stand-in "
            "for sgl_kernel; this feature of SGLang (such as speculative decoding) needs a GPU"
        )

    unavailable.__name__ = unavailable.__qualname__ = name
    return unavailable


globals().update({name: _stand_in(name) for name in IMPORTED_BY})
__all__ = ["IMPORTED_BY", "KernelUnavailableError", *IMPORTED_BY]
