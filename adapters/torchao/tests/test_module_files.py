"""Virtual modules as Python's tools see them: files, sources, walks, resources, runpy, help; reprs under the alias."""

import copy
import importlib.resources
import importlib.util
import inspect
import pickle
import pkgutil
import pydoc
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import pennyweight as pw
import pennyweight_torchao
from pennyweight_torchao.module_tree import TREE


def test_every_module_has_a_file_and_a_source(torchao: ModuleType) -> None:
    assert Path(torchao.__file__).name == "__init__.py"
    for path in TREE:
        module = importlib.import_module(f"torchao.{path}".rstrip("."))
        file = inspect.getsourcefile(module)
        assert file is not None, path
        assert Path(file).is_file(), path
        assert module.__file__ == file
        assert inspect.getsource(module) == Path(file).read_text(encoding="utf-8")
        assert module.__spec__ is not None
        assert module.__spec__.origin == file
    assert "filter_fn" in inspect.getsource(torchao.quantization.quantize_)
    assert inspect.getfile(torchao.quantization.Int8Tensor).endswith("int8_float8_views.py")


def test_a_walk_lists_the_tree_and_nothing_else(torchao: ModuleType) -> None:
    found = {m.name: m.ispkg for m in pkgutil.walk_packages(torchao.__path__, "torchao.")}
    assert set(found) == {f"torchao.{path}" for path in TREE if path}
    assert found["torchao.quantization"]
    assert not found["torchao.quantization.quant_api"]
    assert "quant_primitives" in {m.name for m in pkgutil.iter_modules(torchao.quantization.__path__)}
    with pytest.raises(ModuleNotFoundError):  # our own files are not modules of torchao
        import torchao.module_tree
    assert importlib.util.find_spec("torchao.nothing") is None
    spec = importlib.util.find_spec("torchao.quantization.quant_api")
    assert spec is not None
    assert spec.origin is not None
    assert spec.submodule_search_locations is None


def test_resources_runpy_and_help(torchao: ModuleType) -> None:
    assert importlib.resources.files("torchao").joinpath("not_served.py").is_file()
    assert runpy.run_module("torchao.utils", run_name="__main__")["__name__"] == "__main__"
    with pytest.raises(ImportError, match="cannot be directly executed"):
        runpy.run_module("torchao", run_name="__main__")
    text = pydoc.plain(pydoc.render_doc(torchao))
    assert "served by pennyweight" in text
    assert "quantization (package)" in text


def test_uninstall_leaves_no_hook() -> None:
    hooks = list(sys.path_hooks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pennyweight_torchao, "_CLIENTS", ())
        pennyweight_torchao.install()
    import torchao

    list(pkgutil.walk_packages(torchao.__path__, "torchao."))
    assert len(sys.path_hooks) == len(hooks) + 1
    pennyweight_torchao.uninstall()
    assert sys.path_hooks == hooks
    assert not any("modules of torchao" in entry for entry in sys.path_importer_cache)


def test_classes_and_functions_pickle(torchao: ModuleType) -> None:
    q = torchao.quantization
    for name in ("Int8Tensor", "Float8Tensor", "PerRow", "Int8WeightOnlyConfig", "quantize_", "MappingType"):
        assert pickle.loads(pickle.dumps(getattr(q, name))) is getattr(q, name)


NAMED = {
    "Int8WeightOnlyConfig()": "Int8Tensor",
    "Int8DynamicActivationInt8WeightConfig()": "Int8Tensor",
    "Int4WeightOnlyConfig(group_size=32)": "Int4Tensor",
    "Float8WeightOnlyConfig()": "Float8Tensor",
    "IntxWeightOnlyConfig(torch.int4, PerGroup(32))": "IntxUnpackedToInt8Tensor",
    "NF4WeightOnlyConfig(32)": "NF4Tensor",
    "UIntXWeightOnlyConfig(torch.uint2, 32)": "AffineQuantizedTensor",
}


@pytest.mark.parametrize("call", NAMED)
def test_reprs_name_torchaos_class_while_its_names_are_installed(torchao: ModuleType, call: str) -> None:
    config = eval(call, {n: getattr(pw, n) for n in pw.__all__} | {"torch": torch})
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    torchao.quantization.quantize_(model, config)
    w = model[0].weight
    assert repr(w).startswith(f"{NAMED[call]}(shape=(8, 64), ")
    assert f"Linear(in_features=64, out_features=8, bias=False, weight={NAMED[call]}(" in repr(model)
    assert f"weight={NAMED[call]}(" in repr(copy.deepcopy(model))
    assert type(w).__name__ == w.__class__.__name__ == "AffineQuantizedTensor"
    pennyweight_torchao.uninstall()
    assert repr(w).startswith("AffineQuantizedTensor(")
    pw.dequantize_(model)
    assert repr(model[0]) == "Linear(in_features=64, out_features=8, bias=False)"
