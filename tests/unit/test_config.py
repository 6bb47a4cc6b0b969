"""One configuration, three sources, and one sentence for every value that cannot be used."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.config import (
    CONFIG_ENV,
    ConfigError,
    SmartGenConfig,
    config_from_env,
    load_config,
)

FIELDS = SmartGenConfig.__struct_fields__


def refusal(text: str) -> str:
    """The sentence that `text` is refused with."""
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# Value checks: the whole sentence.


@pytest.mark.parametrize("ratio", [0, -0.25, 1.0001, 20])
def test_a_ratio_outside_its_range(ratio: float) -> None:
    sentence = refusal(f'{{"ratio": {ratio}}}')
    assert sentence == f"ratio is {float(ratio)}; allowed is 0 < ratio <= 1"


def test_a_ratio_that_is_not_a_number() -> None:
    with pytest.raises(ConfigError, match="ratio is nan"):
        SmartGenConfig().for_request({"ratio": float("nan")})


@pytest.mark.parametrize(
    "field", ["blocks_per_layer", "min_prompt_len", "store_gb", "fetch_timeout_s"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_that_must_be_positive(field: str, value: int) -> None:
    sentence = refusal(f'{{"{field}": {value}}}')
    assert sentence.startswith(f"{field} is {value}") and sentence.endswith("; it must be positive")


def test_a_store_too_small_for_any_prompt_is_refused() -> None:
    assert refusal('{"store_gb": 0.0009}') == "store_gb is 0.0009; it must be at least 0.001"
    assert refusal('{"store_gb": 1e-300}') == "store_gb is 1e-300; it must be at least 0.001"
    assert load_config('{"store_gb": 0.001}').store_gb == 0.001


@pytest.mark.parametrize("value", [0, -1])
def test_proactive_blocks_must_be_positive_or_left_out(value: int) -> None:
    sentence = refusal(f'{{"proactive_blocks": {value}}}')
    assert sentence.startswith(f"proactive_blocks is {value}; it must be positive, or left out")
    assert load_config('{"proactive_blocks": null}').proactive_blocks is None


def test_a_selector_that_does_not_exist() -> None:
    assert refusal('{"selector": "magic"}') == (
        "selector is 'magic'; allowed are exact, hata, infinigen, quest, streaming"
    )


# Shape checks: the sentence names the key, what was given and what is allowed.


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    sentence = refusal('{"ratoi": 0.5}')
    assert "unknown key 'ratoi'" in sentence
    assert sentence.endswith(f"allowed keys are {', '.join(FIELDS)}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"ratio": "half"}', ("ratio", "str", "float")),
        ('{"ratio": true}', ("ratio", "bool", "float")),
        ('{"ratio": [0.5]}', ("ratio", "array", "float")),
        ('{"selector": 3}', ("selector", "int", "str")),
        ('{"blocks_per_layer": 1.5}', ("blocks_per_layer", "float", "int")),
        ('{"blocks_per_layer": null}', ("blocks_per_layer", "null", "int")),
        ('{"proactive_blocks": "all"}', ("proactive_blocks", "str", "int | null")),
        ('{"mode": 1}', ("mode", "1", "smartgen, full, partial, proactive_only")),
    ],
)
def test_a_value_of_the_wrong_type(text: str, parts: tuple[str, ...]) -> None:
    sentence = refusal(text)
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("mode", ("smartgen", "full", "partial", "proactive_only")),
        ("order", ("observed", "profile", "sequential", "random", "streaming", "oracle")),
        ("credit", ("adaptive", "fixed")),
        ("transport", ("mooncake",)),
    ],
)
def test_a_word_that_is_not_on_the_list_is_answered_with_the_list(
    field: str, allowed: tuple[str, ...]
) -> None:
    sentence = refusal(f'{{"{field}": "magic"}}')
    assert field in sentence and "'magic'" in sentence
    assert all(word in sentence for word in allowed), sentence


@pytest.mark.parametrize("text", ["{", '{"ratio": }', '{"ratio": 0.5} tail', "{ratio: 0.5}"])
def test_text_that_is_not_json(text: str) -> None:
    assert refusal(text).startswith("smartgen config is not valid JSON: ")


# Sources.


def test_a_text_sets_its_keys_and_leaves_the_defaults() -> None:
    config = load_config(' {"mode": "partial", "ratio": 1, "proactive_blocks": 7} ')
    assert config == SmartGenConfig(mode="partial", ratio=1.0, proactive_blocks=7)
    assert load_config("{}") == SmartGenConfig()


def test_a_file_is_read_like_a_text(tmp_path: Path) -> None:
    file = tmp_path / "smartgen.json"
    file.write_text('{\n "selector": "exact",\n "store_gb": 0.5\n}\n')
    assert load_config(str(file)) == SmartGenConfig(selector="exact", store_gb=0.5)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "absent.json"
    assert refusal(str(file)) == f"smartgen config file {file}: No such file or directory"
    assert f"smartgen config file {tmp_path}: " in refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "given"), [("[1]", "array"), ('"x"', "str"), ("3", "int"), ("null", "null")]
)
def test_a_file_that_holds_no_object(tmp_path: Path, content: str, given: str) -> None:
    file = tmp_path / "smartgen.json"
    file.write_text(content)
    assert refusal(str(file)) == f"smartgen config: Expected `object`, got `{given}`"


def test_a_file_that_is_not_text_is_refused_as_configuration(tmp_path: Path) -> None:
    file = tmp_path / "smartgen.json"
    file.write_bytes(b'{"selector": "\xff\xfe"}')
    assert str(file) in refusal(str(file))


def test_the_environment_switches_on_and_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    assert config_from_env() is None
    monkeypatch.setenv(CONFIG_ENV, "  ")
    assert config_from_env() is None
    monkeypatch.setenv(CONFIG_ENV, '{"ratio": 0.5}')
    assert config_from_env() == SmartGenConfig(ratio=0.5)
    file = tmp_path / "smartgen.json"
    file.write_text('{"mode": "full"}')
    monkeypatch.setenv(CONFIG_ENV, str(file))
    assert config_from_env() == SmartGenConfig(mode="full")
    monkeypatch.setenv(CONFIG_ENV, '{"ratio": 2}')
    with pytest.raises(ConfigError, match=r"ratio is 2\.0"):
        config_from_env()


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SmartGenConfig().ratio = 0.5  # type: ignore[misc]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), values, max_size=3))
def test_any_object_is_a_valid_configuration_or_one_refusal(given_: dict[str, object]) -> None:
    text = msgspec.json.encode(given_).decode()
    try:
        config = load_config(text)
    except ConfigError as error:
        assert str(error)
        return
    assert set(given_) <= set(FIELDS)
    assert 0 < config.ratio <= 1 and config.blocks_per_layer > 0
    # The launcher hands it to the other processes as JSON.
    assert load_config(msgspec.json.encode(config).decode()) == config


# One request's overrides.


def test_a_request_may_override_what_a_comparison_needs() -> None:
    base = SmartGenConfig(selector="exact", ratio=0.3, blocks_per_layer=64, fetch_timeout_s=2.0)
    ours = base.for_request({"mode": "partial", "ratio": 1, "proactive_blocks": 9})
    assert ours == msgspec.structs.replace(base, mode="partial", ratio=1.0, proactive_blocks=9)
    assert base.for_request(None) is base
    assert base.for_request({}) == base
    fixed = msgspec.structs.replace(base, proactive_blocks=9)
    assert fixed.for_request({"proactive_blocks": None}).proactive_blocks is None


@pytest.mark.parametrize(
    "overrides",
    [{"selector": "exact"}, {"ratio": 0.5, "store_gb": 9.0}, {"nonsense": 1}, [], "full", 3],
)
def test_other_overrides_are_refused_with_the_list_of_allowed_keys(overrides: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SmartGenConfig().for_request(overrides)
    assert str(caught.value) == (
        f"custom_params.smartgen is {overrides!r}; allowed is an object with the keys "
        "mode, ratio, lookahead, parallel_lanes, proactive_blocks, order, speculative_ratio, "
        "credit, record, recording, verify, trace"
    )


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"ratio": 0}, "ratio is 0"),
        ({"ratio": "x"}, "ratio"),
        ({"mode": "magic"}, "'magic'"),
        ({"proactive_blocks": 0}, "proactive_blocks is 0"),
        ({"speculative_ratio": -0.1}, r"speculative_ratio is -0.1; allowed is 0 to 1 \(0 = off\)"),
        ({"speculative_ratio": 1.1}, "speculative_ratio is 1.1"),
        ({"credit": "lots"}, "credit is 'lots'; allowed are adaptive, fixed"),
        ({"order": "best"}, "order is 'best'; allowed are observed, profile"),
    ],
)
def test_values_of_overrides_are_checked_like_those_of_the_file(
    overrides: dict[str, object], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        SmartGenConfig().for_request(overrides)


# K_r.


@pytest.mark.parametrize(
    ("mode", "fixed", "wanted"),
    [
        ("smartgen", None, None),
        ("smartgen", 77, 77),
        ("proactive_only", None, None),
        ("proactive_only", 77, 77),
        ("full", None, 30 * 16),
        ("full", 77, 30 * 16),
        ("partial", None, 2 * 16),
        ("partial", 77, 2 * 16),
    ],
)
def test_proactive_blocks_of_every_mode(mode: str, fixed: int | None, wanted: int | None) -> None:
    config = SmartGenConfig(mode=mode, blocks_per_layer=16, proactive_blocks=fixed)  # type: ignore[arg-type]
    assert config.proactive_blocks_of(30) == wanted
