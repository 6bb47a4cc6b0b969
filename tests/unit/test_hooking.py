"""Hooks are checked against SGLang; options that cannot be served are refused in one sentence."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine import hooking, refusals
from sglang_smartgen.engine.cpu_host import STATUS_ENV
from sglang_smartgen.engine.hooking import Hook, HookError, problems, verify

# In this module's namespace, so that hooks can name them.


def plain(a: int, b: int = 0) -> int:
    return a + b


@functools.wraps(plain)
def wrapped(*args: Any) -> int:
    return plain(*args)


def hook(target: str, *parameters: str, roles: tuple[Any, ...] = ("prefill", "decode")) -> Hook:
    return Hook(target, "after", lambda *_: None, parameters, roles, "it holds the roof up")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name of its own: pytest imports this file in a way that pkgutil cannot resolve."""
    module = SimpleNamespace(plain=plain, wrapped=wrapped)
    monkeypatch.setitem(sys.modules, "smartgen_targets", module)  # type: ignore[arg-type]


def test_a_hook_that_fits_is_no_problem() -> None:
    assert problems([hook("smartgen_targets.plain", "a", "b")]) == []
    # What somebody else wrapped before is looked through.
    assert problems([hook("smartgen_targets.wrapped", "a", "b")]) == []


@pytest.mark.parametrize(
    "target", ["smartgen_targets.absent", "smartgen_absent.plain", "textwrap.dedent.absent"]
)
def test_a_missing_target_is_one_sentence(target: str) -> None:
    (sentence,) = problems([hook("smartgen_targets.plain", "a", "b"), hook(target, "a")])
    assert sentence.startswith(f"{target} is missing in this SGLang (")
    assert sentence.endswith("; it holds the roof up") and "\n" not in sentence


@pytest.mark.parametrize("expected", [("a",), ("b", "a"), ("a", "b", "c"), ()])
def test_other_parameters_are_one_sentence(expected: tuple[str, ...]) -> None:
    (sentence,) = problems([hook("smartgen_targets.plain", *expected)])
    assert sentence == (
        f"smartgen_targets.plain takes a, b in this SGLang; SmartGen expects {', '.join(expected)}"
    )


def installed(monkeypatch: pytest.MonkeyPatch, *hooks: Hook) -> None:
    """Hooks whose targets were all `plain` when they were installed."""
    monkeypatch.setattr(hooking, "_installed", [(one, plain) for one in hooks])


def test_verify_passes_when_every_target_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, hook("smartgen_targets.wrapped"))
    verify("prefill")


def test_verify_names_what_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, hook("smartgen_targets.wrapped"), hook("smartgen_targets.plain"))
    with pytest.raises(HookError) as caught:
        verify("prefill")
    assert str(caught.value).endswith("did not apply the hooks on smartgen_targets.plain")


def test_verify_asks_only_for_the_hooks_of_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, hook("smartgen_targets.plain", roles=("decode",)))
    verify("prefill")
    with pytest.raises(HookError, match=r"smartgen_targets\.plain"):
        verify("decode")


def test_verify_refuses_when_nothing_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(HookError, match="any target"):
        verify("decode")


# The pinned SGLang, in a process of its own.

PROBE = """
import json, sys
import msgspec
from sglang_smartgen.engine import cpu_host
cpu_host.prepare_environment(["--device", "cpu"])
import sglang.srt.managers.scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang_smartgen.engine import hooking
from sglang_smartgen.engine.hooking import Hook, HookError, install, problems, verify
from sglang_smartgen.plugin import HOOKS

def refusal(action, *args):
    try:
        action(*args)
    except HookError as error:
        return str(error)

def after(result, text):
    return result + "!"

answer = {"problems": problems(HOOKS)}
dedent = Hook("textwrap.dedent", "after", after, ("text",), ("prefill",), "")
absent = dedent._replace(target="textwrap.absent", why="it is the roof")
answer["bad install"] = refusal(install, [dedent, absent])
answer["registered by a bad install"] = sorted(HookRegistry._hooks)
install([*HOOKS, dedent])
answer["registered"] = sorted(HookRegistry._hooks)
answer["before"] = {role: refusal(verify, role) for role in ("prefill", "decode")}
HookRegistry.apply_hooks()
answer["after"] = {role: refusal(verify, role) for role in ("prefill", "decode")}
import textwrap
answer["call"] = [textwrap.dedent(" a"), hooking.fired["textwrap.dedent"]]
from sglang_smartgen.engine.manager import sglang_can_read
room = [b"7", b"h", b"1", b"s", b"\\0" * 8, b"0", b"", b"1", b"", b""]
messages = [room, [b"SMARTGEN"], [b"ABORT"], [], [b""], [b"x"], [b"\\xff"], [b"7"], [b"None"],
            room[:7], [*room[:4], b"\\0" * 7, *room[5:]], [*room[:7], b"x", *room[8:]]]
answer["read"] = [sglang_can_read(frames) for frames in messages]
answer["options"] = [field.name for field in msgspec.structs.fields(ServerArgs)]
json.dump(answer, sys.stdout)
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    environ = {key: value for key, value in os.environ.items() if "SMARTGEN" not in key}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        env=environ | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_the_table_fits_the_pinned_sglang(probe: dict[str, Any]) -> None:
    assert probe["problems"] == []
    from sglang_smartgen.plugin import HOOKS

    assert probe["registered"] == sorted({*(h.target for h in HOOKS), "textwrap.dedent"})


def test_what_sglangs_bootstrap_thread_would_die_of_is_known(probe: dict[str, Any]) -> None:
    assert probe["read"] == [True] * 3 + [False] * 9


def test_a_bad_hook_keeps_all_from_being_registered(probe: dict[str, Any]) -> None:
    sentence = probe["bad install"]
    assert sentence.startswith("SmartGen refuses to start: textwrap.absent is missing")
    assert probe["registered by a bad install"] == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_verify_refuses_every_hook_that_sglang_has_not_applied(
    probe: dict[str, Any], role: str
) -> None:
    from sglang_smartgen.plugin import HOOKS

    sentence = probe["before"][role]
    unnoticed = [h.target for h in HOOKS if role in h.roles and h.target not in sentence]
    assert unnoticed == []
    assert ("textwrap.dedent" in sentence) == (role == "prefill")


def test_sglang_applies_every_hook_and_verify_sees_it(probe: dict[str, Any]) -> None:
    assert probe["after"] == {"prefill": None, "decode": None}


def test_a_call_is_counted_and_its_result_used(probe: dict[str, Any]) -> None:
    assert probe["call"] == ["a!", 1]


def test_every_checked_option_exists(probe: dict[str, Any]) -> None:
    declared = refusals.declare_options(SimpleNamespace(disaggregation_mode="decode"))
    names = {*refusals.ALLOWED, *declared, "disaggregation_decode_retraction_backup"}
    names |= {"enable_hierarchical_cache", "hicache_mem_layout", "device"}
    names |= {"cuda_graph_backend_decode"}
    assert names - set(probe["options"]) == set()


# Options.

# Option -> a value that is refused, and what the sentence allows instead.
REFUSED: dict[str, tuple[object, str]] = {
    "disaggregation_mode": ("null", "prefill or decode"),
    "disaggregation_transfer_backend": ("nixl", "mooncake"),
    "disaggregation_enable_kv_checksum": (True, "False"),
    "disaggregation_decode_enable_radix_cache": (True, "False"),
    "disaggregation_decode_enable_offload_kvcache": (True, "False"),
    "disaggregation_decode_allocation_policy": ("late", "early"),
    "disaggregation_decode_host_receive_threshold": (0.5, "1"),
    "optimistic_prefill_attempts": (2, "0"),
    "enable_pd_role_switch": (True, "False"),
    "enable_hisparse": (True, "False"),
    "enable_pdmux": (True, "False"),
    "enable_unified_memory": (True, "False"),
    "enable_page_major_kv_layout": (True, "False"),
    "enable_mixed_chunk": (True, "False"),
    "enable_two_batch_overlap": (True, "False"),
    "enable_streaming_session": (True, "False"),
    "speculative_algorithm": ("EAGLE", "unset"),
    "dllm_algorithm": ("LowConfidence", "unset"),
    "page_size": (16, "unset or 1"),
    "dp_size": (2, "1"),
    "enable_dp_attention": (True, "False"),
    "pp_size": (2, "1"),
    "attn_cp_size": (2, "1"),
    "dcp_size": (2, "1"),
}


BACKENDS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")


def options(**changed: object) -> SimpleNamespace:
    """A decode node that SmartGen can serve with, but for what is changed."""
    good = dict.fromkeys(REFUSED, False) | {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_decode_host_receive_threshold": 1.0,
        "optimistic_prefill_attempts": 0,
        "speculative_algorithm": None,
        "dllm_algorithm": None,
        "page_size": None,
        "dp_size": 1,
        "pp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "disaggregation_decode_retraction_backup": None,
        "enable_hierarchical_cache": False,
        "hicache_mem_layout": "layer_first",
        "device": "cpu",
        **dict.fromkeys(BACKENDS),
    }
    return SimpleNamespace(**(good | changed))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*refusals.REFUSED_ENV, refusals.DEFERRED_RELEASE):
        monkeypatch.delenv(name, raising=False)


def refusal(view: SimpleNamespace) -> str:
    with pytest.raises(ConfigError) as caught:
        refusals.check_options(view)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_every_option_of_the_table_has_a_case_here() -> None:
    assert set(REFUSED) == set(refusals.ALLOWED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_option_is_named_with_its_value_and_what_is_allowed(name: str) -> None:
    value, allowed = REFUSED[name]
    sentence = refusal(options(**{name: value}))
    flag = name.replace("_", "-")
    assert sentence.startswith(f"--{flag} is {value}; SmartGen allows {allowed}, since ")


@pytest.mark.parametrize("name", ["SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_USE_HND_KVCACHE"])
def test_a_refused_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "True")
    assert refusal(options()).startswith(f"{name} is set; SmartGen needs it unset, since ")
    monkeypatch.setenv(name, "0")
    refusals.check_options(options())


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("value", ["0", "false", "False", "NO"])
def test_the_deferred_release_must_stay_on(
    monkeypatch: pytest.MonkeyPatch, mode: str, value: str
) -> None:
    view = options(disaggregation_mode=mode)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", value)
    assert refusal(view).startswith(
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off; SmartGen needs it on, since "
    )
    for on in ("1", "true", ""):
        monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", on)
        refusals.check_options(view)


def test_a_decode_node_has_its_own_backend_and_no_retraction_backup() -> None:
    for name in BACKENDS:
        assert refusal(options(**{name: "fa3"})) == (
            f"--{name.replace('_', '-')} is fa3; a SmartGen decode node allows smartgen "
            "(or leave it out)"
        )
    sentence = refusal(options(disaggregation_decode_retraction_backup="host"))
    assert sentence.startswith("--disaggregation-decode-retraction-backup is host; ")
    prefill = options(
        disaggregation_mode="prefill",
        attention_backend="fa3",
        disaggregation_decode_retraction_backup="host",
    )
    refusals.check_options(prefill)


def test_a_hierarchical_cache_is_for_a_prefill_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_ENV, raising=False)
    sentence = refusal(options(enable_hierarchical_cache=True))
    assert sentence.startswith("--enable-hierarchical-cache is True; a SmartGen decode node allows")
    prefill = {"disaggregation_mode": "prefill", "enable_hierarchical_cache": True}
    assert "under sglang_smartgen.launch_server only" in refusal(options(**prefill))
    refusals.check_options(options(**prefill, device="cuda"))
    monkeypatch.setenv(STATUS_ENV, "{}")
    refusals.check_options(options(**prefill))
    for layout in refusals.TIER_LAYOUTS:
        refusals.check_options(options(**prefill, hicache_mem_layout=layout))
    sentence = refusal(options(**prefill, hicache_mem_layout="page_head"))
    assert sentence.startswith("--hicache-mem-layout is page_head; SmartGen allows layer_first or ")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"disaggregation_mode": "prefill"},
        {"page_size": 1},
        {"disaggregation_decode_host_receive_threshold": 1},
        {"attention_backend": "torch_native"},
        {"attention_backend": "smartgen"},
        {"disaggregation_decode_retraction_backup": "none"},
    ],
    ids=str,
)
def test_what_can_be_served_passes(changed: dict[str, object]) -> None:
    refusals.check_options(options(**changed))


def test_what_smartgen_sets_itself() -> None:
    shared = {"disable_overlap_schedule": True, "page_size": 1}
    assert refusals.declare_options(options(disaggregation_mode="prefill")) == shared
    assert refusals.declare_options(options()) == shared | {
        **dict.fromkeys(BACKENDS, "smartgen"),
        "disable_decode_cuda_graph": True,
        "disaggregation_decode_retraction_backup": "none",
    }
