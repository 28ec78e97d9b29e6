"""`scripts/test` runs each value of each parameter of each test at least once, whatever it leaves out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import pytest_collection_modifyitems, slow_tests


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # by identity, as pytest's


def item(name: str, **params: Any) -> Any:
    given = SimpleNamespace(params=params) if params else None
    keywords = {name, "exhaustive"} if name == "test_long" else {name}
    return Item(
        path=Path("test_x.py"), originalname=name, name=f"{name}[{params}]", callspec=given, keywords=keywords,
        nodeid=f"test_x.py::{name}[{params}]",
    )  # fmt: skip


def selected(items: list[Any], *options: str) -> list[Any]:
    config: Any = SimpleNamespace(
        getoption=lambda name: name in options, hook=SimpleNamespace(pytest_deselected=lambda items: None)
    )
    kept = list(items)
    pytest_collection_modifyitems(config, kept)
    return kept


def test_each_value_is_kept_and_combinations_are_not() -> None:
    shapes, dtypes = [object(), object(), object()], ["float32", "bfloat16"]
    items = [item("test_a", shape=s, dtype=d) for s in shapes for d in dtypes]
    items += [item("test_b", dtype=d) for d in dtypes] + [item("test_c"), item("test_d"), item("test_long")]
    kept = selected(items, "--each-value")
    assert [i.name for i in kept if i.originalname == "test_a"] == [items[k].name for k in (0, 1, 2, 4)]
    assert [i.originalname for i in kept[4:]] == ["test_b", "test_b", "test_c", "test_d"]
    assert selected(items) == items


def test_slow_tests_are_left_out_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conftest.slow_tests", lambda: {"test_x.py::test_c"})
    items = [item("test_a", x=1), item("test_c", x=1), item("test_c", x=2)]
    assert selected(items, "--each-value") == items[:1]
    assert selected(items, "--each-value", "--slow") == selected(items) == items


def test_a_slow_test_runs_as_few_combinations_as_have_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conftest.slow_tests", lambda: {"test_x.py::test_a"})
    items = [item(name, x=x, y=y) for name in ("test_a", "test_b") for x in range(3) for y in range(2)]
    kept = selected(items, "--each-value", "--slow")
    assert [(i.originalname, *i.callspec.params.values()) for i in kept] == [
        ("test_a", 0, 0), ("test_a", 1, 1), ("test_a", 2, 0),
        ("test_b", 0, 0), ("test_b", 0, 1), ("test_b", 1, 0), ("test_b", 2, 0),
    ]  # fmt: skip


def test_every_slow_test_is_there() -> None:
    """A line of tests/slow_tests.txt that names no test any more would leave its successor in."""
    root = Path(__file__).parent.parent
    for line in slow_tests():
        path, _, name = line.partition("::")
        assert f"def {name}(" in (root / path).read_text("utf-8"), line
