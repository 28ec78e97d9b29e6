"""Members and values of torchao's enumerations, and how they print and compare."""

import pickle

import pytest
import torch

from pennyweight.planning.granularity import MappingType
from pennyweight_torchao import enums

VALUES = {
    "KernelPreference": {"AUTO": "auto", "TORCH": "torch", "MSLK": "mslk", "EMULATED": "emulated", "TRITON": "triton"},
    "PackingFormat": {"PLAIN": "plain", "OPAQUE": "opaque"},
    "Int4PackingFormat": {"PLAIN_INT32": "plain_int32", "TILE_PACKED_TO_4D": "tile_packed_to_4d"},
    "Int4ChooseQParamsAlgorithm": {"TINYGEMM": "tinygemm", "HQQ": "hqq"},
    "Float8PackingFormat": {"PLAIN": "plain", "SPARSE_2D_DATA_2D_METADATA": "sparse_2d_data_2d_metadata"},
    "IntxPackingFormat": {"UNPACKED_TO_INT8": "unpacked_to_int8", "OPAQUE_TORCHAO_AUTO": "opaque_torchao_auto"},
    "IntxChooseQParamsAlgorithm": {"AFFINE": "affine", "HQQ_SCALE_ONLY": "hqq_scale_only"},
    "QuantizationStep": {"PREPARE": "prepare", "CONVERT": "convert", "PREPARE_FOR_LOADING": "prepare_for_loading"},
    "ScaleCalculationMode": {"FLOOR": "floor", "RCEIL": "rceil", "CEIL": "ceil", "EVEN": "even"},
}


@pytest.mark.parametrize("name", VALUES)
def test_members(name: str) -> None:
    enum = getattr(enums, name)
    for member, value in VALUES[name].items():
        assert enum[member].value == value
        assert enum(value) is enum[member]
        assert str(enum[member]) == f"{name}.{member}"
        assert pickle.loads(pickle.dumps(enum[member])) is enum[member]
        assert (enum[member] == value) == (name != "ScaleCalculationMode")  # the others are strings too


def test_aliases_and_tuples() -> None:
    assert enums.Float8PackingFormat.SPARSE_CUTLASS is enums.Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
    assert enums.Float8MMConfig() == (False, False, False)
    assert enums.Float8MMConfig(use_fast_accum=True)._asdict() == {
        "emulate": False, "use_fast_accum": True, "pad_inner_dim": False
    }  # fmt: skip
    assert enums.MappingType is MappingType
    assert [m.name for m in enums.ZeroPointDomain] == ["INT", "FLOAT", "NONE"]
    assert [m.name for m in enums.TorchAODType] == [f"INT{bits}" for bits in range(1, 8)]


def test_the_old_dtype_names_warn_of_nothing() -> None:
    assert enums.TorchAODType.INT4 is enums.TorchAODType["INT4"]
    assert isinstance(torch.int4, torch.dtype)
