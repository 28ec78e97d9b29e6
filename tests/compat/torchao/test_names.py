"""The module tree: every public name of three releases of torchao is served, or its absence is explained."""

import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pennyweight import compat
from pennyweight.compat.torchao.module_tree import TREE
from pennyweight.compat.torchao.removed import GONE, why_missing

HOME = "pennyweight.compat.torchao"
# Names as the sources of the releases have them; see tests/golden/make_torchao_names.py.
NAMES_FILE = Path(__file__).parents[2] / "golden" / "torchao_names.json"
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
    code = f"import {HOME}.safetensors_state"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("release", NAMES)
def test_most_of_quantization_is_there(release: str) -> None:
    """What is explained away must not creep up: names of the package that users import from most."""
    module = importlib.import_module(f"{HOME}.quantization")
    names = NAMES[release]["quantization"]
    absent = [n for n in names if not hasattr(module, n)]
    assert len(absent) <= 0.35 * len(names), absent


@pytest.mark.parametrize("path", sorted(TREE))
def test_modules_import_and_give_what_they_list(path: str) -> None:
    module = importlib.import_module(f"{HOME}.{path}" if path else HOME)
    for name in module.__all__:
        assert hasattr(module, name), name
    assert set(module.__all__) <= set(dir(module))


def test_nothing_is_both_there_and_gone() -> None:
    for path in GONE:
        module, _, name = path.rpartition(".")
        if module not in TREE:
            continue
        served = importlib.import_module(f"{HOME}.{module}" if module else HOME)
        assert name not in served.__all__, path


ORDER = [f"0.{minor}" for minor in range(1, 20)]


def _releases(text: str) -> set[str]:
    """ "0.9 to 0.17", "0.10 on", "0.12 and 0.13", "0.12": the releases that are meant."""
    if " and " in text:
        return set(text.split(" and "))
    first, _, last = text.partition(" to ")
    if first.endswith(" on"):
        first, last = first.removesuffix(" on"), ORDER[-1]
    end = last or first
    return set(ORDER[ORDER.index(first) : ORDER.index(end) + 1])


@pytest.mark.parametrize("release", NAMES)
def test_what_is_said_of_releases_is_true(release: str) -> None:
    """As far as the sources of this one can tell."""
    short = release.rpartition(".")[0]
    modules = NAMES[release]
    wrong = []
    for path, (releases, _) in GONE.items():
        if path.startswith("experimental"):  # left out of the names, see make_torchao_names.py
            continue
        module, _, name = path.rpartition(".")
        there = any(m == path or m.startswith(f"{path}.") for m in modules) or name in modules.get(module, ())
        if there != (short in _releases(releases)):
            wrong.append((path, releases, there))
    assert wrong == []


@pytest.mark.usefixtures("torchao")
def test_importing_what_is_gone_says_which_releases_had_it_and_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"torchao 0.13 had it.*use instead: IntxUnpackedToInt8Tensor"):
        from torchao.quantization import IntxUnpackedTensor  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"torchao 0.4 to 0.9 had it.*GPU kernel"):
        import torchao.prototype.splitk  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Int5000Tensor'"):
        from torchao.quantization import Int5000Tensor  # noqa: F401
    import torchao.quantization as module

    assert not hasattr(module, "IntxUnpackedTensor")
    assert getattr(module, "IntxUnpackedTensor", None) is None
    with pytest.raises(AttributeError, match=r"torchao 0.13 had it"):
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

    from pennyweight.compat.torchao.dtypes import AffineQuantizedTensor

    assert deep is AffineQuantizedTensor
    assert torchao.quantize_ is quantize_
    assert torchao.quantization.utils.compute_error is torchao.quantization.compute_error
    assert importlib.metadata.version("torchao") == torchao.__version__


SCRIPT = """
import sys, types
{before}
from pennyweight import compat
try:
    compat.install({name!r})
except Exception as e:
    print(type(e).__name__, e)
else:
    import torchao
    print("served", torchao.__name__, "transformers" in sys.modules, "triton" in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "name", "says"),
    [
        ("", "torchao", "served torchao False False"),
        ("sys.modules['torchao'] = types.ModuleType('torchao')", "torchao", "RuntimeError torchao is already imported"),
        ("", "bitsandbytes", "ValueError install('bitsandbytes')"),
        ("from pennyweight import compat; compat.install('torchao')", "torchao", "served torchao False False"),
        ("sys.modules['peft'] = types.ModuleType('peft')", "torchao", "UserWarning peft is already imported"),
    ],
)
def test_install(before: str, name: str, says: str) -> None:
    code = SCRIPT.format(before=before, name=name)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(says), done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:.*already imported")
def test_uninstall_takes_it_back() -> None:
    compat.install("torchao")
    import torchao  # noqa: F401

    compat.uninstall("torchao")
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
    assert checked > 100
