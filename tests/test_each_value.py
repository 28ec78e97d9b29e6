"""`scripts/test` runs each value of each parameter of each test at least once, whatever it leaves out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import pytest_collection_modifyitems


def item(name: str, **params: Any) -> Any:
    given = SimpleNamespace(params=params) if params else None
    keywords = {name, "exhaustive"} if name == "test_long" else {name}
    return SimpleNamespace(
        path=Path("test_x.py"), originalname=name, name=f"{name}[{params}]", callspec=given, keywords=keywords
    )


def selected(items: list[Any], each_value: bool = True) -> list[Any]:
    config: Any = SimpleNamespace(
        getoption=lambda name: each_value, hook=SimpleNamespace(pytest_deselected=lambda items: None)
    )
    kept = list(items)
    pytest_collection_modifyitems(config, kept)
    return kept


def test_each_value_is_kept_and_combinations_are_not() -> None:
    shapes, dtypes = [object(), object(), object()], ["float32", "bfloat16"]
    items = [item("test_a", shape=s, dtype=d) for s in shapes for d in dtypes]
    items += [item("test_b", dtype=d) for d in dtypes] + [item("test_c"), item("test_d"), item("test_long")]
    kept = selected(items)
    assert [i.name for i in kept if i.originalname == "test_a"] == [items[k].name for k in (0, 1, 2, 4)]
    assert [i.originalname for i in kept[4:]] == ["test_b", "test_b", "test_c", "test_d"]
    assert selected(items, each_value=False) == items
