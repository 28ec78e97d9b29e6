"""Configs as JSON: as torchao writes them, read without building anything but what is known."""

import dataclasses
import enum
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.planning import configs
from pennyweight.planning.configs import AOBaseConfig
from pennyweight_torchao import config_json, enums, v0_8_configs, v0_8_layouts
from pennyweight_torchao.algorithms import awq, gptq, smoothquant
from pennyweight_torchao.config_json import (
    ConfigJSONEncoder,
    VersionMismatchError,
    config_from_dict,
    config_to_dict,
    register_config_type,
)
from pennyweight_torchao.configs import float8
from pennyweight_torchao.mx import inference, training

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    (release, call): stored
    for release in ("0.12", "0.18")
    for call, stored in json.loads((GOLDEN / f"torchao_configs_{release}.json").read_text())["cases"].items()
}
NAMES = {name: getattr(pw, name) for name in pw.__all__}
for module in (
    enums, v0_8_configs, v0_8_layouts, float8, inference, training, awq, smoothquant, gptq,
):  # fmt: skip
    NAMES |= {name: getattr(module, name) for name in module.__all__}
NAMES["torch"] = torch
# torchao's configs that this package lacks, or refuses a field of: what the error names
REFUSED = {
    "BlockSparseWeightConfig(blocksize=64)": "find class BlockSparseWeightConfig",
    "FbgemmConfig(torch.bfloat16, torch.int4, torch.bfloat16, [1, 1, 256])": "find class FbgemmConfig",
}


def ours(call: str) -> AOBaseConfig:
    return eval(call, dict(NAMES))


def read(stored: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Stored version is not the same")
        return config_from_dict(stored)


# what older releases write by default: it says how codes lie, or repeats what the layout means
OLDER = {"layout": None, "zero_point_domain": None}


def means(config: AOBaseConfig) -> Any:
    """A config with what torchao fills in filled in, and without what means nothing here."""
    older = {name: value for name, value in OLDER.items() if hasattr(config, name)}
    config = dataclasses.replace(config, **older)  # type: ignore[type-var]
    if isinstance(config, pw.FqnToConfig):
        table = {name: value and means(value) for name, value in config.fqn_to_config.items()}
        return pw.FqnToConfig(table)
    return config


@pytest.mark.parametrize(("release", "call"), [case for case in CASES if case[1] not in REFUSED])
def test_what_torchao_wrote_is_read_as_the_same_config(release: str, call: str) -> None:
    stored = json.loads(json.dumps(CASES[release, call]))
    config = read(stored)
    assert means(config) == means(ours(call))
    assert stored == CASES[release, call]


@pytest.mark.parametrize("call", [call for release, call in CASES if release == "0.18" and call not in REFUSED])
def test_ours_are_written_as_torchao_writes_them(call: str) -> None:
    written, stored = config_to_dict(ours(call)), json.loads(json.dumps(CASES["0.18", call]))
    kind = stored["_type"]
    # torchao writes a string where it was given one; ours the member of the enum that it names
    packing = stored["_data"].get("int4_packing_format")
    if isinstance(packing, str) and kind == "Int4WeightOnlyConfig":
        stored["_data"]["int4_packing_format"] = {"_type": "Int4PackingFormat", "_data": packing.upper()}
    assert written == stored
    assert json.loads(json.dumps(ours(call), cls=ConfigJSONEncoder)) == config_to_dict(ours(call))


@pytest.mark.parametrize(("release", "call"), [case for case in CASES if case[1] in REFUSED])
def test_what_ours_lack_is_named(release: str, call: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[call]):
        read(CASES[release, call])


ROUND_TRIPS = [
    *sorted({call for _, call in CASES if call not in REFUSED}),
    'UIntXWeightOnlyConfig(dtype="uint2")',
    "Float8DynamicActivationFloat8SemiSparseWeightConfig()",
    'MXWeightOnlyConfig("e3m2", scaling_mode="even")',
    "NF4WeightOnlyConfig(32, double_quant=False)",
    "CodebookWeightOnlyConfig(3, 2, group_size=16)",
    'SpecConfig(QuantSpec(get_format("uint4"), (32,), zero_point=get_format("uint4")))',
    "ContractedAxis(Int8WeightOnlyConfig(), -2)",
    'SpecConfig(QuantSpec(get_format("int4"), (32,), zero_point=True), rule="asymmetric")',
    'SpecConfig(QuantSpec(get_format("int8"), (1, -1)), ActivationSpec(QuantSpec(get_format("int8"), (-1,))))',
    "Int8StaticActivationInt8WeightConfig(torch.tensor([[0.5]]))",
    "Int8StaticActivationInt8WeightConfig(torch.tensor([[0.5], [0.25]]))",
    "Float8StaticActivationFloat8WeightConfig(scale=0.25, granularity=PerRow())",
    "Int8WeightOnlyConfig(granularity=PerBlock((32, 32)))",
    "Int4WeightOnlyConfig(layout=TensorCoreTiledLayout(4), zero_point_domain=ZeroPointDomain.INT, preserve_zero=True)",
    "Int4DynamicActivationInt4WeightConfig(layout=CutlassInt4PackedLayout())",
    "PrototypeInt4WeightOnlyConfig(group_size=64)",
    "Float8DynamicActivationFloat8WeightConfig(granularity=(PerTensor(), PerRow()))",
    "Float8DynamicActivationInt4WeightConfig(group_size=64)",
    "NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False, act_scale=0.25)",
    'NVFP4DynamicActivationNVFP4WeightConfig(step="convert")',
    "NVFP4InferenceConfig(NVFP4MMConfig.WEIGHT_ONLY)",
    "MXFPInferenceConfig(activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2)",
    'MXLinearConfig.from_recipe_name("mxfp4_cutlass")',
    'AWQConfig(Int4WeightOnlyConfig(group_size=64), step="prepare_for_loading")',
    'SmoothQuantConfig(Int8DynamicActivationInt8WeightConfig(), "prepare_for_loading", alpha=0.3)',
    'GPTQConfig("convert", Int8WeightOnlyConfig(), percdamp=0.02)',
]


@pytest.mark.parametrize("call", ROUND_TRIPS)
def test_ours_come_back(call: str) -> None:
    config = ours(call)
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert type(again) is type(config)
    if isinstance(config, pw.UIntXWeightOnlyConfig):
        assert str(again.dtype).removeprefix("torch.") == str(config.dtype).removeprefix("torch.")
        again = dataclasses.replace(again, dtype=config.dtype)
    assert again == config


def test_configs_over_a_config_have_torchaos_fields() -> None:
    """As torchao 0.18 writes them, which is how checkpoints on the hub name them."""
    data = config_to_dict(ours('AWQConfig(Int8WeightOnlyConfig(), step="prepare_for_loading")'))
    assert data["_type"] == "AWQConfig"
    assert list(data["_data"]) == ["base_config", "step", "scale_search_space_size"]
    data = config_to_dict(ours('SmoothQuantConfig(Int8WeightOnlyConfig(), step="convert")'))
    assert list(data["_data"]) == ["base_config", "step", "alpha", "use_running_absmax"]


def test_every_config_of_ours_is_written_and_read() -> None:
    known = {name: v for name, v in config_json._known().items() if issubclass(v, AOBaseConfig)}
    tried = {type(ours(call)) for call in ROUND_TRIPS}
    assert {cls.__name__ for cls in {*known.values()} - tried} == set()


def test_an_int4_config_that_torchao_cannot_read_says_its_group() -> None:
    data = config_to_dict(pw.Float8DynamicActivationInt4WeightConfig(group_size=64))["_data"]
    assert data == {"int4_packing_format": "preshuffled", "group_size": 64}


# -- configs of one's own ----------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = "f"


@dataclasses.dataclass
class Inner:
    dtypes: list[torch.dtype]
    pair: tuple[int, ...] = (1, 2)


@dataclasses.dataclass
class OwnConfig(AOBaseConfig):
    value: int = 42
    mode: Mode = Mode.FAST
    inner: Any = None
    by_name: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: int = 2


@dataclasses.dataclass
class OldConfig(AOBaseConfig):
    VERSION = 3
    value: int = 1


OWN = OwnConfig(7, Mode.FAST, Inner([torch.int4], (3, (4,))), {"a": configs.Int8WeightOnlyConfig(), "b": None})


def test_one_of_your_own_is_read_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = config_to_dict(OWN)
    assert stored["_data"]["inner"]["_data"]["pair"] == {
        "_type": "tuple",
        "_data": [3, {"_type": "tuple", "_data": [4]}],
    }
    message = "Failed to find class OwnConfig in any of the allowed modules"
    with pytest.raises(ValueError, match=message):
        config_from_dict(stored)
    with monkeypatch.context() as patch:
        patch.setattr(config_json, "ALLOWED_AO_MODULES", {__name__, *config_json.ALLOWED_AO_MODULES})
        assert config_from_dict(stored) == OWN
        assert config_from_dict(stored).inner.pair == (3, (4,))
    with pytest.raises(ValueError, match=message):
        config_from_dict(stored)
    with monkeypatch.context() as patch:
        patch.setattr(config_json, "_REGISTERED", {})
        for cls in (OwnConfig, Mode, Inner):
            assert register_config_type(cls) is cls
        assert config_from_dict(stored) == OWN


def test_the_list_of_modules_is_heeded_under_torchaos_name(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.core import config

    stored = config.config_to_dict(OWN)
    with monkeypatch.context() as patch:
        patch.setattr("torchao.core.config.ALLOWED_AO_MODULES", {__name__})
        assert config.config_from_dict(stored) == OWN
    with pytest.raises(ValueError, match="Failed to find class OwnConfig"):
        config.config_from_dict(stored)


def test_a_module_that_is_not_imported_stays_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "would_run.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(config_json, "ALLOWED_AO_MODULES", {"would_run"})
    with pytest.raises(ValueError, match="Failed to find class Something"):
        config_from_dict({"_type": "Something", "_data": {}})
    assert "would_run" not in sys.modules


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_json, "ALLOWED_AO_MODULES", {__name__, *config_json.ALLOWED_AO_MODULES})
    assert (AOBaseConfig.version, AOBaseConfig.VERSION) == (1, 1)
    stored = config_to_dict(OwnConfig())
    assert stored["_version"] == 2
    with pytest.warns(UserWarning, match="Stored version is not the same as current default version of the config"):
        assert config_from_dict(stored | {"_version": 1}).version == 1
    for version in (3, 0, "1", None, 1.0):
        with pytest.raises(VersionMismatchError, match=f"OwnConfig: stored version {version} != current version 2"):
            config_from_dict(stored | {"_version": version})
    stored = config_to_dict(OldConfig())
    assert stored == {"_type": "OldConfig", "_version": 3, "_data": {"value": 1}}
    assert config_from_dict(stored) == OldConfig()
    with pytest.raises(VersionMismatchError) as raised:
        config_from_dict(stored | {"_version": 2})
    error = raised.value
    assert (error.type_path, error.stored_version, error.current_version) == ("OldConfig", 2, 3)
    with pytest.warns(UserWarning, match="Int8WeightOnlyConfig was stored as version 1, .* 2; it is read as that"):
        got = config_from_dict({"_type": "Int8WeightOnlyConfig", "_version": 1, "_data": {"group_size": None}})
    assert got == configs.Int8WeightOnlyConfig()
    assert isinstance(got, pw.Int8WeightOnlyConfig)


def test_what_json_has_no_form_for_is_named() -> None:
    with pytest.raises(TypeError, match=r"OwnConfig\.by_name\['x'\]: Object of type Tensor is not JSON serializable"):
        config_to_dict(OwnConfig(by_name={"x": torch.ones(2)}))
    with pytest.raises(TypeError, match=r"OwnConfig\.inner"):
        json.dumps(OwnConfig(inner=print), cls=ConfigJSONEncoder)
    with pytest.raises(TypeError, match=r"expected a config, .* got dict"):
        config_to_dict({})  # type: ignore[arg-type]
    assert json.dumps([torch.int8, pw.PerRow()], cls=ConfigJSONEncoder) == (
        '[{"_type": "torch.dtype", "_data": "int8"}, {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}]'
    )
    assert ConfigJSONEncoder().encode_value(3) == 3


INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "this dict has"),
        ({"_type": "Int8WeightOnlyConfig"}, "has '_type' and '_data'"),
        ({"_type": ["Int8WeightOnlyConfig"], "_data": {}}, "must be the name of a type"),
        ({"_type": "AOBaseConfig", "_data": {}}, "Failed to find class AOBaseConfig"),
        ({"_type": "as_format", "_data": {}}, "Failed to find class as_format"),
        ({"_type": "os.system", "_data": {}}, r"Failed to find class os\.system"),
        ({"_type": "__builtins__", "_data": {}}, "Failed to find class __builtins__"),
        ({**INT8, "_data": []}, "must be a dict of its fields"),
        (
            {**INT8, "_data": {"groups": 3}},
            "has no field 'groups', which has the value 3; it has group_size, granularity",
        ),
        ({**INT8, "_data": {"_bound": 3}}, "has no field '_bound'"),
        ({**INT8, "_data": {"group_size": -1}}, "cannot be made from .*group_size"),
        ({**INT8, "_data": {"group_size": "x"}}, "cannot be made from .*group_size"),
        ({**INT8, "_data": {"granularity": {"_type": "PerGroup", "_data": {}}}}, "PerGroup cannot be made from"),
        ({**INT8, "_data": {"granularity": {"_type": "torch.dtype", "_data": "load"}}}, "no member 'load'"),
        ({**INT8, "_data": {"granularity": {"_type": "MappingType", "_data": "mro"}}}, "no member 'mro'"),
        ({**INT8, "_data": {"granularity": {"_type": "MappingType", "_data": {}}}}, "no member {}"),
        ({**INT8, "_data": {"granularity": {"_type": "KernelPreference", "_data": "auto"}}}, "no member 'auto'"),
        ({"_type": "PerRow", "_version": 2, "_data": {}}, "PerRow: stored version 2"),
        ({"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": {"_type": "X", "_data": 1}}}}, "find class X"),
        ({"_type": "SpecConfig", "_data": {"weight": {"_type": "QuantSpec", "_data": {"format": "x"}}}}, "QuantSpec"),
    ],
)
def test_bad_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_dict(data)


def test_only_a_dict_is_read() -> None:
    with pytest.raises(TypeError, match="got str"):
        config_from_dict("{}")  # type: ignore[arg-type]
