"""The selector that docs/selectors.md writes is made, calibrated and run as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import select_cases as cases
import torch

from sglang_smartgen.select import make_selector, registry, selector_class

PAGE = Path(__file__).parents[2] / "docs" / "selectors.md"


def test_the_pages_example_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SELECTORS", dict(registry.SELECTORS))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert 60 < code.count("\n") < 130  # "about 100 lines"
    exec(compile(code, str(PAGE), "exec"), {"__name__": "signs"})
    monkeypatch.setitem(cases.CASES, "signs", ("signs", {"power": 0.5}, {"sharp": 2}))
    selector = cases.selector_of("signs")
    assert selector.describe() == "signs (33 bytes a token and KV head)"
    keys, query = cases.keys_of(100, 4), 3 * cases.queries_of(1, 4).view(4, 2, 32)
    whole = cases.encode(selector, 2, keys)
    assert torch.equal(torch.cat([selector.encode(2, k, None) for k in keys.split(13)]), whole)
    exact = make_selector("exact", cases.WHOLE)
    truth = exact.score(2, query, keys)
    index = selector.pick(selector.score(2, query, whole), 20)
    assert truth.gather(1, index).sum() / truth.sum() > 0.4  # chance is 0.2
    one = cases.selections("signs", 0, 1, None)
    assert torch.equal(torch.cat([cases.selections("signs", r, 2, None) for r in (0, 1)], 1), one)
    with pytest.raises(ValueError, match="selector signs needs an artifact"):
        make_selector("signs", cases.WHOLE)
    with pytest.raises(ValueError, match="sharp is 0"):
        make_selector(
            "signs", cases.WHOLE, artifact=cases.artifact_of("signs"), options={"sharp": 0}
        )


def test_the_page_names_every_selector_and_option() -> None:
    text = PAGE.read_text()
    for name in registry.SELECTORS:
        assert f"| `{name}` |" in text
        for option in selector_class(name).defaults:
            assert f"`{option}`" in text
