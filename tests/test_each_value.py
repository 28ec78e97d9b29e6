"""`scripts/test` runs each value of each parameter of each test at least once, whatever it leaves out."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conftest


def combinations(**values: list[Any]) -> list[Any]:
    """What pytest makes of the parameters of a test: the last of them changes first."""
    found: list[dict[str, Any]] = [{}]
    for name, some in values.items():
        found = [{**one, name: value} for one in found for value in some]
    return [SimpleNamespace(params=params, marks=[]) for params in found]


def kept(calls: list[Any], *options: str) -> list[Any]:
    metafunc: Any = SimpleNamespace(_calls=calls, config=SimpleNamespace(getoption=lambda name: name in options))
    hook: Any = conftest.pytest_generate_tests(metafunc)
    next(hook)
    with pytest.raises(StopIteration):
        next(hook)
    return [list(call.params.values()) for call in metafunc._calls]


def test_each_value_is_kept_and_combinations_are_not() -> None:
    shapes = [[1], [2], [3]]  # by identity: they have no hash
    calls = combinations(shape=shapes, dtype=["float32", "bfloat16"])
    assert kept(calls, "--each-value") == [[[1], "float32"], [[2], "bfloat16"], [[3], "float32"]]
    assert kept(calls) == [list(call.params.values()) for call in calls]
    assert kept([], "--each-value") == []


def test_values_of_exhaustive_combinations_are_left_out_and_others_are_not() -> None:
    calls = combinations(x=[0, 1], y=[0, 1])
    exhaustive = SimpleNamespace(name="exhaustive")
    calls[1].marks = calls[3].marks = [exhaustive]  # y = 1
    assert kept(calls, "--each-value") == [[0, 0], [1, 0]]
    for call in calls:
        call.marks = [exhaustive]
    assert kept(calls, "--each-value") == [[0, 0]]  # one item, which is deselected


def selected(items: list[Any], *options: str) -> list[str]:
    config: Any = SimpleNamespace(
        getoption=lambda name: name in options, hook=SimpleNamespace(pytest_deselected=lambda items: None)
    )
    left = list(items)
    conftest.pytest_collection_modifyitems(config, left)
    return [item.nodeid for item in left]


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # by identity, as pytest's


def test_slow_and_exhaustive_tests_are_left_out_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conftest.slow_tests", lambda: {"test_x.py::test_slow"})
    names = ["test_x.py::test_a[0]", "test_x.py::test_slow[0]", "test_x.py::test_slow[1]", "test_x.py::test_long[0]"]
    items = [Item(nodeid=name, keywords={"exhaustive"} if "long" in name else set()) for name in names]
    assert selected(items) == names
    assert selected(items, "--each-value") == names[:1]
    assert selected(items, "--each-value", "--slow") == names[:3]


def test_pytest_makes_no_item_of_what_is_left_out(tmp_path: Path) -> None:
    """With the function that pytest calls: its list of combinations is not part of its interface."""
    page = tmp_path / "test_pairs.py"
    page.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('y', [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])\n"
        "@pytest.mark.parametrize('x', [0, 1, 2])\n"
        "def test_pair(x, y): pass\n"
        "@pytest.mark.exhaustive\n"
        "@pytest.mark.parametrize('x', [0, 1])\n"
        "def test_long(x): pass\n"
    )

    names: list[str] = []

    class Plugin:
        pytest_addoption = staticmethod(conftest.pytest_addoption)
        pytest_generate_tests = staticmethod(conftest.pytest_generate_tests)
        pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            names.extend(item.name for item in session.items)

    arguments = ["--collect-only", "--quiet", "--each-value", "-p", "no:cacheprovider", "-c", os.devnull]
    assert pytest.main([*arguments, f"--rootdir={tmp_path}", str(page)], plugins=[Plugin()]) == 0
    assert names == ["test_pair[0-0]", "test_pair[1-1]", "test_pair[2-0]"]


def test_every_slow_test_is_there() -> None:
    """A line of tests/slow_tests.txt that names no test any more would leave its successor in."""
    root = Path(__file__).parent.parent
    for line in conftest.slow_tests():
        path, _, name = line.partition("::")
        assert f"def {name}(" in (root / path).read_text("utf-8"), line
