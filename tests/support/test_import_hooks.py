"""after_import: called after the module, once per execution, whatever the order; nothing is imported for it."""

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pennyweight.support.import_hooks import after_import
from tests import forked

NAME = "watched_by_a_test"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package in which the watched module is, slow enough for threads to meet in it."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("")
    (tmp_path / NAME / "inner.py").write_text("import time\ntime.sleep(0.05)\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_called_after_the_module_and_again_after_a_reload() -> None:
    seen: list[bool] = []
    after_import(f"{NAME}.inner", lambda: seen.append(sys.modules[f"{NAME}.inner"].DONE))
    assert (seen, f"{NAME}.inner" in sys.modules) == ([], False)
    found = importlib.util.find_spec(f"{NAME}.inner")  # who only looks does not import
    assert found is not None
    assert "DONE" in found.loader.get_source(f"{NAME}.inner")  # type: ignore[union-attr]
    assert seen == []
    inner = importlib.import_module(f"{NAME}.inner")
    assert seen == [True]
    assert type(inner.__loader__).__module__ == type(inner.__spec__.loader).__module__  # type: ignore[union-attr]
    assert type(inner.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(inner)
    assert seen == [True, True]
    after_import(f"{NAME}.inner", lambda: seen.append(False))  # it is there already
    assert seen == [True, True, False]


def test_threads_and_several_watchers() -> None:
    seen: list[str] = []
    after_import(f"{NAME}.inner", lambda: seen.append("a"))
    after_import(f"{NAME}.inner", lambda: seen.append("b"))
    threads = [threading.Thread(target=importlib.import_module, args=(f"{NAME}.inner",)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(seen) == ["a", "b"]


def test_an_absent_module_stays_absent() -> None:
    after_import(f"{NAME}.nowhere", lambda: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.nowhere")
    assert importlib.util.find_spec(f"{NAME}.nowhere") is None


def test_the_cost_for_other_imports() -> None:
    start = time.perf_counter()
    after_import(f"{NAME}.inner", lambda: None)
    watch = sys.meta_path[0]
    for _ in range(1000):  # more modules than transformers and torch have between them take less than a millisecond
        watch.find_spec("some.other.module", None)
    assert time.perf_counter() - start < 0.05


PROBE = """
import sys, torch
{first}
import pennyweight
assert not any(m.startswith("pennyweight.integrations") for m in sys.modules) or {loaded}
import transformers.quantizers.auto as auto
assert "pennyweight" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
assert "pennyweight.integrations.transformers.adapter" not in sys.modules  # comes with the first folder
import importlib
importlib.reload(auto)
config = auto.AutoQuantizationConfig.from_dict({{"quant_method": "pennyweight"}})
assert type(config).__name__ == "PennyweightConfig"
assert type(auto.AutoHfQuantizer.from_config(config)).__name__ == "PennyweightQuantizer"
import pennyweight.integrations.transformers.adapter as ours
importlib.reload(ours)
assert type(auto.AutoQuantizationConfig.from_dict({{"quant_method": "pennyweight"}})) is ours.PennyweightConfig
"""


@pytest.mark.parametrize("first", ["", "import transformers.quantizers.auto"])
def test_transformers_knows_the_method_however_it_is_imported(first: str) -> None:
    program = PROBE.format(first=first, loaded=bool(first))
    run = forked.run(["-c", program])
    assert run.returncode == 0, run.stderr[-2000:]
