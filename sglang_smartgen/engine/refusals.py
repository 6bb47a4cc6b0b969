"""Server options that SmartGen cannot serve with, each refused in one sentence at start."""

from __future__ import annotations

import os
from typing import Any

from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine import cpu_host
from sglang_smartgen.engine.cpu_host import host_tier

BACKEND = "smartgen"

# Option -> (values SmartGen can serve with, why not the others).
ALLOWED: dict[str, tuple[tuple[object, ...], str]] = {
    "disaggregation_mode": (("prefill", "decode"), "SmartGen works between the two roles"),
    "disaggregation_transfer_backend": (("mooncake",), "SmartGen extends this backend"),
    "disaggregation_enable_kv_checksum": ((False,), "it digests a whole prompt before decode"),
    "disaggregation_decode_enable_radix_cache": ((False,), "D receives whole prompts"),
    "disaggregation_decode_enable_offload_kvcache": ((False,), "partial KV cannot be offloaded"),
    "disaggregation_decode_allocation_policy": (("early",), "slots must be known before prefill"),
    "disaggregation_decode_host_receive_threshold": ((1, 1.0), "it stages whole requests"),
    "optimistic_prefill_attempts": ((0,), "slots must be known before prefill"),
    "enable_pd_role_switch": ((False,), "masks and store belong to one role"),
    "enable_hisparse": ((False,), "it brings its own sparse attention"),
    "enable_pdmux": ((False,), "it splits prefill into layers of its own"),
    "enable_unified_memory": ((False,), "slots are virtual there"),
    "enable_page_major_kv_layout": ((False,), "a token's row must be contiguous"),
    "enable_mixed_chunk": ((False,), "P must not decode"),
    "enable_two_batch_overlap": ((False,), "it runs two batches in one forward"),
    "enable_streaming_session": ((False,), "it keeps a row beyond its request"),
    "speculative_algorithm": ((None,), "one query a step is selected for"),
    "dllm_algorithm": ((None,), "one query a step is selected for"),
    "page_size": ((None, 1), "the unit of selection is one token"),
    "dp_size": ((1,), "ranks with other requests do not agree on failed fetches and freed slots"),
    "enable_dp_attention": ((False,), "all ranks must have the same requests"),
    "pp_size": ((1,), "all layers must be on one rank"),
    "attn_cp_size": ((1,), "a prompt must be on one rank"),
    "dcp_size": ((1,), "a prompt must be on one rank"),
}

TIER_LAYOUTS = host_tier.LAYOUTS

DEFERRED_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
REFUSED_ENV = {
    "SGLANG_DISAGG_STAGING_BUFFER": "it stages whole chunks",
    "SGLANG_USE_HND_KVCACHE": "a token's row must be contiguous",
}


def check_options(view: Any) -> None:
    """Raises ConfigError with one sentence for the first option of `view` that cannot be served."""
    for name, (allowed, why) in ALLOWED.items():
        value = getattr(view, name)
        if value not in allowed:
            wanted = " or ".join("unset" if v is None else str(v) for v in dict.fromkeys(allowed))
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}; SmartGen allows {wanted}, since {why}"
            )
    for name, why in REFUSED_ENV.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            raise ConfigError(f"{name} is set; SmartGen needs it unset, since {why}")
    if os.environ.get(DEFERRED_RELEASE, "").lower() in ("0", "false", "no"):
        raise ConfigError(
            f"{DEFERRED_RELEASE} is off; SmartGen needs it on, since it keeps slots from a new "
            "owner while an aborted transfer drains"
        )
    if view.enable_hierarchical_cache:
        _check_hierarchy(view)
    if view.disaggregation_mode == "decode":
        _check_decode(view)


def _check_hierarchy(view: Any) -> None:
    if view.disaggregation_mode == "decode":
        raise ConfigError(
            "--enable-hierarchical-cache is True; a SmartGen decode node allows False, since D has "
            "no prefix cache"
        )
    if view.device == "cpu" and cpu_host.STATUS_ENV not in os.environ:
        raise ConfigError(
            "--enable-hierarchical-cache is True; on a CPU SmartGen allows it under "
            "sglang_smartgen.launch_server only, since SGLang itself copies to and from its host "
            "tier on a GPU"
        )
    layout = view.hicache_mem_layout
    if layout not in TIER_LAYOUTS:
        raise ConfigError(
            f"--hicache-mem-layout is {layout}; SmartGen allows {' or '.join(TIER_LAYOUTS)}, since "
            "a token's row must be contiguous"
        )


def _check_decode(view: Any) -> None:
    if view.disaggregation_decode_retraction_backup not in (None, "none"):
        raise ConfigError(
            "--disaggregation-decode-retraction-backup is "
            f"{view.disaggregation_decode_retraction_backup}; SmartGen allows none, since partial "
            "KV cannot be backed up"
        )
    for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        value = getattr(view, name)
        if value not in (None, "torch_native", BACKEND):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}; a SmartGen decode node allows {BACKEND} "
                "(or leave it out)"
            )


def declare_options(view: Any, graphs: bool = False) -> dict[str, object]:
    """Options that SmartGen sets itself, by name. graphs: D decodes in CUDA graphs."""
    declared: dict[str, object] = {"disable_overlap_schedule": True, "page_size": 1}
    if view.disaggregation_mode == "decode":
        for name in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
            declared[name] = BACKEND
        # A whole graph would freeze selection and fetch, which the host drives; a breakable one
        # runs them between its pieces.
        if graphs:
            declared["cuda_graph_backend_decode"] = "breakable"
        else:
            declared["disable_decode_cuda_graph"] = True
        declared["disaggregation_decode_retraction_backup"] = "none"
    return declared
