"""The module tree: what clients import is served; every other public name of three releases says what to use."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import pytest

import pennyweight_torchao
from adapters.torchao.tests.clients import IMPORTS
from pennyweight_torchao.module_tree import TREE
from pennyweight_torchao.not_served import MODULES, why_missing
from pennyweight_torchao.not_served import NAMES as NOT_SERVED
from tests import forked

HOME = "pennyweight_torchao"
# Names as the sources of the releases have them; see tests/golden/make_torchao_names.py.
NAMES_FILE = Path(__file__).parent / "golden" / "torchao_names.json"
NAMES = json.loads(NAMES_FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("release", NAMES)
def test_every_name_is_there_or_explained(release: str) -> None:
    assert len(NAMES[release]) > 100
    dumb = []
    for module, names in NAMES[release].items():
        if module not in TREE:
            dumb += [] if why_missing(module, None) else [module]
            continue
        served = importlib.import_module(f"{HOME}.{module}" if module else HOME)
        dumb += [f"{module}.{n}" for n in names if not hasattr(served, n) and why_missing(module, n) is None]
    assert dumb == []


def test_a_file_can_be_imported_before_the_package_is_asked_for_names() -> None:
    """``from . import name`` in a file must not look the name up among those that the package serves."""
    code = f"import {HOME}.pickles"
    done = forked.run(["-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(TREE))
def test_modules_import_and_give_what_they_list(path: str) -> None:
    module = importlib.import_module(f"{HOME}.{path}" if path else HOME)
    for name in module.__all__:
        assert hasattr(module, name), name
    assert set(module.__all__) <= set(dir(module))


def test_a_row_is_of_names_that_are_not_served() -> None:
    for path in NOT_SERVED:
        module, _, name = path.rpartition(".")
        if name != "*" and module in TREE:
            served = importlib.import_module(f"{HOME}.{module}" if module else HOME)
            assert not hasattr(served, name) or path in MODULES, path


# -- what clients import ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "module"), [(client, module) for client, modules in IMPORTS.items() for module in modules]
)
def test_what_clients_import_is_served(client: str, module: str) -> None:
    served = importlib.import_module(f"{HOME}.{module}" if module else HOME)
    assert [name for name in IMPORTS[client][module].split() if not hasattr(served, name)] == []


def imports_of_torchao(package: str) -> dict[str, set[str]]:
    """Module of torchao -> names that the source of an installed package imports from it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, set[str]] = {}
    for file in Path(spec.origin).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "torchao" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torchao":
                found.setdefault(str(node.module)[8:], set()).update(alias.name for alias in node.names)
    return found


# Imported for torchao before 0.16, whose version this package does not report unless it is asked to.
OLDER = {("dtypes.uintx.uint4_layout", "UInt4Tensor"), ("float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")}


@pytest.mark.parametrize("client", ["transformers", "diffusers", "peft", "accelerate"])
def test_what_installed_clients_import_is_served(client: str) -> None:
    found = imports_of_torchao(client)
    assert found, f"{client} does not import torchao any more"
    absent = {
        (module, name)
        for module, names in found.items()
        for name in names
        if module not in TREE or not hasattr(importlib.import_module(f"{HOME}.{module}" if module else HOME), name)
    }
    assert absent - OLDER == set()


@pytest.mark.usefixtures("torchao")
def test_importing_what_is_not_served_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"pennyweight does not serve it; use instead: IntxUnpackedToInt8Tensor"):
        from torchao.quantization import IntxUnpackedTensor  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"does not serve it; use instead: .*kernel for one GPU"):
        import torchao.prototype.splitk  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Int5000Tensor'"):
        from torchao.quantization import Int5000Tensor  # noqa: F401
    import torchao.quantization as module

    assert not hasattr(module, "IntxUnpackedTensor")
    assert getattr(module, "IntxUnpackedTensor", None) is None
    with pytest.raises(AttributeError, match=r"does not serve it"):
        _ = module.IntxUnpackedTensor


@pytest.mark.usefixtures("torchao")
def test_a_function_is_not_hidden_by_the_package_of_its_name() -> None:
    import torchao.quantization
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.workflows import Int8Tensor

    assert callable(quantize_)
    assert torchao.quantization.quantize_ is quantize_
    assert Int8Tensor is torchao.quantization.Int8Tensor


@pytest.mark.usefixtures("torchao")
def test_both_names_give_the_same_objects() -> None:
    import torchao
    from torchao.dtypes.affine_quantized_tensor import AffineQuantizedTensor as deep
    from torchao.quantization.quant_api import quantize_

    from pennyweight_torchao.dtypes import AffineQuantizedTensor

    assert deep is AffineQuantizedTensor
    assert torchao.quantize_ is quantize_
    assert torchao.quantization.utils.compute_error is torchao.quantization.compute_error
    assert importlib.metadata.version("torchao") == torchao.__version__


SCRIPT = """
import os, sys, types, warnings
import pennyweight
assert not any(name.startswith("torchao") for name in sys.modules)
for before in sys.argv[1:]:  # forked: none sees what another has installed
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()
exec(before)
import pennyweight_torchao
try:
    pennyweight_torchao.install()
except Exception as e:
    print(type(e).__name__, e)
else:
    import torchao
    print("served", torchao.__name__, "transformers" in sys.modules, "triton" in sys.modules)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_install() -> None:
    says = {
        "": "served torchao False False",
        "sys.modules['torchao'] = types.ModuleType('torchao')": "RuntimeError torchao is already imported",
        "import pennyweight_torchao; pennyweight_torchao.install()": "served torchao False False",
        "sys.modules['peft'] = types.ModuleType('peft')": "UserWarning peft is already imported",
    }
    command = ["-W", "error", "-c", SCRIPT, *says]
    done = forked.run(command)
    lines = done.stdout.splitlines()
    assert len(lines) == len(says), done.stdout + done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, says.values(), strict=True)), done.stdout


@pytest.mark.filterwarnings("ignore:.*already imported")
def test_uninstall_takes_it_back() -> None:
    pennyweight_torchao.install()
    import torchao  # noqa: F401

    pennyweight_torchao.uninstall()
    assert "torchao" not in sys.modules
    assert not any(getattr(f, "prefix", None) == "torchao" for f in sys.meta_path)


SIGNATURES = json.loads(NAMES_FILE.with_name("torchao_signatures.json").read_text(encoding="utf-8"))
# Arguments that cannot mean what they meant: pieces that one device packed, and what came to be called otherwise.
OTHERWISE = {
    "Float8AQTTensorImpl", "Int4CPUAQTTensorImpl", "TensorCoreTiledAQTTensorImpl",  # built of plain pieces
    "BlockSparseAQTTensorImpl", "DA8W4CPUAQTTensorImpl", "Int4XPUAQTTensorImpl", "MarlinSparseAQTTensorImpl",
    "PackedLinearInt8DynamicActivationIntxWeightAQTTensorImpl", "SemiSparseAQTTensorImpl",
    "MXTensor", "NVFP4Tensor",  # the arguments of 0.13 on
    "Float8StaticActivationFloat8WeightConfig",  # the founding era's, of the same name
    "Float8DynamicActivationFloat8WeightConfig",  # alg_id: which sparse kernel
}  # fmt: skip
# The eras put these in another order: ours is that of the current one, and a layout is told from what stands there.
REORDERED = {
    "Float8DynamicActivationFloat8WeightConfig",
    "GemlitePackedLayout",
    "GemliteUIntXWeightOnlyConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MXLinearConfig",
    "ModuleFqnToConfig",
    "PrototypeInt4WeightOnlyConfig",
    "get_gemlite_aqt_kwargs",
    "quantize_",
    "to_mx",
}


@pytest.mark.parametrize("release", SIGNATURES)
def test_what_is_served_takes_the_arguments_that_it_took(release: str) -> None:
    checked, wrong = 0, []
    for module, calls in SIGNATURES[release].items():
        if module not in TREE:
            continue
        served = importlib.import_module(f"{HOME}.{module}")
        for name, arguments in calls.items():
            if not hasattr(served, name):
                continue
            try:
                ours = inspect.signature(getattr(served, name)).parameters
            except (TypeError, ValueError):  # a union of types, a class of torch's own
                continue
            checked += 1
            positional, _, by_name = " ".join(arguments).partition("*")
            kinds = {p.kind for p in ours.values()}
            absent = set(positional.split()) | set(by_name.split())
            absent -= set(ours)
            if absent and inspect.Parameter.VAR_KEYWORD not in kinds and name not in OTHERWISE:
                wrong.append((module, name, sorted(absent)))
            by_place = [n for n, p in ours.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            if not absent and name not in REORDERED:
                theirs = positional.split()[: len(by_place)]
                wrong += [] if theirs == by_place[: len(theirs)] else [(module, name, theirs, by_place)]
    assert wrong == []
    assert checked > 80
