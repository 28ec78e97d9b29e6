"""Fields of configs under torchao's names: assignment, values that torchao's constructors fill in, reprs."""
# ruff: noqa: E501 - reprs

import copy
import dataclasses
import pickle
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight_torchao.configs.assignment import enable, snapshot
from tests import forked


def codes(config: Any, quantize: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 8, bias=False))
    quantize(model, config)
    w = model[0].weight
    return [w.tensor_impl.int_data, w.scale]


def test_a_field_takes_an_assignment_and_counts(torchao: ModuleType) -> None:
    q = torchao.quantization
    config = q.Int4WeightOnlyConfig(group_size=128)
    config.group_size = 32
    assert config == q.Int4WeightOnlyConfig(group_size=32)
    assert hash(config) == hash(q.Int4WeightOnlyConfig(group_size=32))
    for got, want in zip(
        codes(config, q.quantize_), codes(q.Int4WeightOnlyConfig(group_size=32), q.quantize_), strict=True
    ):
        assert torch.equal(got, want)
    assert config.scheme.__self__ is config
    assert type(config) is q.Int4WeightOnlyConfig


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        ("Int4WeightOnlyConfig()", "group_size", 0, ValueError),
        ("Int4WeightOnlyConfig()", "group_size", "64", TypeError),
        ("IntxWeightOnlyConfig()", "weight_dtype", torch.uint8, ValueError),
        ("Int8DynamicActivationInt8WeightConfig()", "granularity", 32, TypeError),
        ("FqnToConfig({'a': Int8WeightOnlyConfig()})", "fqn_to_config", {1: None}, TypeError),
    ],
)
def test_a_wrong_value_changes_nothing(torchao: ModuleType, make: str, name: str, value: Any, error: type) -> None:
    config = eval(
        make, vars(torchao.quantization) | {n: getattr(torchao.quantization, n) for n in torchao.quantization.__all__}
    )
    before = dict(vars(config))
    with pytest.raises(error):
        setattr(config, name, value)
    assert vars(config) == before


def test_values_are_settled_as_by_the_constructor(torchao: ModuleType) -> None:
    q = torchao.quantization
    config = q.Float8DynamicActivationFloat8WeightConfig()
    assert config.granularity == [q.PerTensor(), q.PerTensor()]
    config.granularity = q.PerRow()
    assert config.granularity == [q.PerRow(), q.PerRow()]
    static = q.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.5)
    static.act_quant_scale = torch.tensor([0.25])
    assert static.act_quant_scale == 0.25
    table = q.FqnToConfig({"0": q.Int8WeightOnlyConfig()})
    table.fqn_to_config = {"1": None}
    assert table.fqn_to_config == table.module_fqn_to_config == {"1": None}
    table.module_fqn_to_config = {"2": None}
    assert table.fqn_to_config == {"2": None}


def test_attributes_of_the_callers_own(torchao: ModuleType) -> None:
    config = torchao.quantization.Int8WeightOnlyConfig()
    config.note = "mine"
    assert config.note == "mine"
    assert config == torchao.quantization.Int8WeightOnlyConfig()
    del config.note
    assert not hasattr(config, "note")


def test_copies_and_pickles_of_a_changed_config(torchao: ModuleType) -> None:
    config = torchao.quantization.Int8WeightOnlyConfig()
    config.group_size = 32
    for again in (
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
    ):
        assert again == config
        assert again.group_size == 32


def test_granularities_stay_frozen_as_in_torchao(torchao: ModuleType) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        torchao.quantization.PerGroup(32).group_size = 64
    with pytest.raises(dataclasses.FrozenInstanceError):
        torchao.dtypes.PlainLayout().anything = 1


def test_ours_stay_frozen_without_torchaos_names() -> None:
    code = "import pennyweight as pw\nfor c in (pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(), pw.NF4WeightOnlyConfig()):\n"
    code += "    try:\n        c.group_size = 3\n    except AttributeError as e:\n        print(type(e).__name__)\n"
    done = forked.run(["-c", code], check=True)
    assert done.stdout.split() == ["FrozenInstanceError"] * 3


def test_a_subclass_of_a_users_own_is_assigned_to(torchao: ModuleType) -> None:
    q = torchao.quantization

    @dataclasses.dataclass(frozen=True)
    class Frozen(q.Int8WeightOnlyConfig):
        more: int = 1

    with pytest.raises(dataclasses.FrozenInstanceError):
        Frozen().more = 2

    @dataclasses.dataclass
    class Open(torchao.core.config.AOBaseConfig):
        size: int = 1

    enable(Open)
    config = Open()
    config.size = 2
    assert config.size == 2
    assert snapshot(config) is config


def test_a_plain_subclass_of_a_frozen_config_is_assigned_to(torchao: ModuleType) -> None:
    config = torchao.quantization.qat.QATConfig(pw.Int8WeightOnlyConfig(), step="prepare")
    config.step = "convert"
    assert config.step == "convert"

    class Own(pw.NVFP4WeightOnlyConfig):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("mine")

    enable(Own)
    with pytest.raises(TypeError, match="mine"):
        Own().use_dynamic_per_tensor_scale = False


def test_quantize_keeps_nothing_that_an_assignment_reaches(torchao: ModuleType) -> None:
    q = torchao.quantization
    seen: list[Any] = []

    class Mine(q.Int8WeightOnlyConfig):
        pass

    @pw.register_quantize_module_handler(Mine)
    def keep(module: nn.Module, config: Any) -> nn.Module:
        seen.append(config)
        return module

    config = Mine()
    q.quantize_(nn.Sequential(nn.Linear(32, 8)), config)
    config.group_size = 16
    assert [type(c) for c in seen] == [Mine]
    assert seen[0].group_size is None
    inner = q.Int8WeightOnlyConfig()
    table = q.FqnToConfig({"0": inner})
    kept = snapshot(table)
    inner.group_size = 16
    table.fqn_to_config["1"] = None
    assert list(kept.fqn_to_config) == ["0"]
    assert kept.fqn_to_config["0"].group_size is None


def test_a_reader_in_another_thread_sees_valid_configs(torchao: ModuleType) -> None:
    q = torchao.quantization
    config = q.Float8DynamicActivationFloat8WeightConfig()
    row, tensor = [q.PerRow(), q.PerRow()], [q.PerTensor(), q.PerTensor()]
    bad: list[Any] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found = snapshot(config).granularity
            if found not in (row, tensor):
                bad.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(300):
        config.granularity = q.PerRow() if i % 2 else q.PerTensor()
    done.set()
    reader.join()
    assert bad == []


# repr in torchao 0.18
REPRS = {
    "Int8WeightOnlyConfig()": "Int8WeightOnlyConfig(group_size=None, granularity=PerRow(dim=-1), set_inductor_config=True, version=2)",
    "Int4WeightOnlyConfig(group_size=32)": "Int4WeightOnlyConfig(group_size=32, set_inductor_config=True, int4_packing_format=<Int4PackingFormat.PLAIN: 'plain'>, int4_choose_qparams_algorithm=<Int4ChooseQParamsAlgorithm.TINYGEMM: 'tinygemm'>, int4_tile_packed_ntile=8, version=2)",
    "Int8DynamicActivationInt8WeightConfig()": "Int8DynamicActivationInt8WeightConfig(act_mapping_type=<MappingType.SYMMETRIC: 1>, weight_only_decode=False, granularity=PerRow(dim=-1), set_inductor_config=True, version=2, reduce_range=False)",
    "Float8WeightOnlyConfig()": "Float8WeightOnlyConfig(weight_dtype=torch.float8_e4m3fn, set_inductor_config=True, version=2, granularity=PerRow(dim=-1))",
    "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())": "Float8DynamicActivationFloat8WeightConfig(activation_dtype=torch.float8_e4m3fn, weight_dtype=torch.float8_e4m3fn, granularity=[PerRow(dim=-1), PerRow(dim=-1)], packing_format=<Float8PackingFormat.PLAIN: 'plain'>, mm_config=Float8MMConfig(emulate=False, use_fast_accum=True, pad_inner_dim=False), activation_value_lb=None, activation_value_ub=None, kernel_preference=<KernelPreference.AUTO: 'auto'>, set_inductor_config=True, version=2, alg_id=0)",
    "IntxWeightOnlyConfig(torch.int4, PerGroup(32))": "IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group_size=32), mapping_type=<MappingType.SYMMETRIC: 1>, scale_dtype=None, intx_packing_format=<IntxPackingFormat.UNPACKED_TO_INT8: 'unpacked_to_int8'>, intx_choose_qparams_algorithm=<IntxChooseQParamsAlgorithm.AFFINE: 'affine'>, version=2)",
    "IntxWeightOnlyConfig(layout=PlainLayout())": "IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(axis=0), mapping_type=<MappingType.SYMMETRIC: 1>, scale_dtype=None, intx_packing_format=<IntxPackingFormat.UNPACKED_TO_INT8: 'unpacked_to_int8'>, intx_choose_qparams_algorithm=<IntxChooseQParamsAlgorithm.AFFINE: 'affine'>, version=2, layout=PlainLayout())",
}  # fmt: skip


@pytest.mark.parametrize("call", REPRS)
def test_repr_is_that_of_the_current_release(torchao: ModuleType, call: str) -> None:
    q = torchao.quantization
    assert repr(eval(call, {n: getattr(q, n) for n in q.__all__} | {"torch": torch})) == REPRS[call]


def test_normalize_granularity(torchao: ModuleType) -> None:
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quant_api import _normalize_granularity as f

    assert f(None) == (PerTensor(), PerTensor())
    assert f(PerRow()) == f([PerRow(), PerRow()]) == f((PerRow(), PerRow())) == (PerRow(), PerRow())
    assert f([PerBlock([1, 128]), PerBlock([128, 128])]) == (PerBlock((1, 128)), PerBlock((128, 128)))
    config = torchao.quantization.Float8DynamicActivationFloat8WeightConfig(granularity=[PerRow(), PerRow()])
    assert f(config.granularity) == (PerRow(), PerRow())
    for wrong in ([PerRow(), PerTensor()], [PerRow()], 3, PerBlock((1, 128))):
        with pytest.raises(ValueError, match=r"granularity|Unsupported"):
            f(wrong)


def test_mapping_types_have_torchaos_values_and_older_pickles_load() -> None:
    assert [(m.name, m.value) for m in pw.MappingType] == [
        ("SYMMETRIC", 1), ("SYMMETRIC_NO_CLIPPING_ERR", 2), ("ASYMMETRIC", 3),
    ]  # fmt: skip
    assert repr(pw.MappingType.SYMMETRIC) == "<MappingType.SYMMETRIC: 1>"
    for member in pw.MappingType:
        assert pw.MappingType(member.rule) is member  # its value in pickles of older releases
        assert pickle.loads(pickle.dumps(member)) is member
    with pytest.raises(ValueError, match="mixed"):
        pw.MappingType("mixed")
