"""The current era: torchao's tensor classes as views of the one class, and their attributes."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight_torchao.prototype.mx_formats.mx_tensor import MXTensor
from pennyweight_torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from pennyweight_torchao.prototype.quantization.int4 import Int4OpaqueTensor
from pennyweight_torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8Tensor,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4PlainInt32Tensor,
    Int4PreshuffledTensor,
    Int4Tensor,
    Int4TilePackedTo4dTensor,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    IntxOpaqueTensor,
    IntxUnpackedToInt8Tensor,
    IntxWeightOnlyConfig,
    MappingType,
    MXDynamicActivationMXWeightConfig,
    NVFP4WeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    fqn_matches_fqn_config,
    quantize_,
)
from pennyweight_torchao.quantization.quantize_.common import _choose_quant_func_and_quantize_tensor
from pennyweight_torchao.quantization.quantize_.workflows import (
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)
from pennyweight_torchao.utils import TorchAOBaseTensor

BF16 = torch.bfloat16
CONFIGS = {
    "int8": (Int8WeightOnlyConfig(), Int8Tensor),
    "int8 group": (Int8WeightOnlyConfig(granularity=PerGroup(32)), Int8Tensor),
    "int8 dynamic": (Int8DynamicActivationInt8WeightConfig(), Int8Tensor),
    "int8 asymmetric": (Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC), Int8Tensor),
    "int8 reduced": (Int8DynamicActivationInt8WeightConfig(reduce_range=True), Int8Tensor),
    "int8 static": (Int8StaticActivationInt8WeightConfig(torch.tensor(0.02)), Int8Tensor),
    "int4": (Int4WeightOnlyConfig(group_size=32), Int4Tensor),
    "intx": (IntxWeightOnlyConfig(torch.int3, PerGroup(16)), IntxUnpackedToInt8Tensor),
    "intx asymmetric": (IntxWeightOnlyConfig(torch.int5, PerAxis(0), MappingType.ASYMMETRIC), IntxUnpackedToInt8Tensor),
    "8da4w": (Int8DynamicActivationIntxWeightConfig(torch.int4), IntxUnpackedToInt8Tensor),
    "float8": (Float8WeightOnlyConfig(), Float8Tensor),
    "float8 dynamic": (Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), Float8Tensor),
    "mx": (MXDynamicActivationMXWeightConfig(), MXTensor),
    "mx fp4": (MXDynamicActivationMXWeightConfig(weight_dtype=torch.float4_e2m1fn_x2), MXTensor),
    "nvfp4": (NVFP4WeightOnlyConfig(), NVFP4Tensor),
}


def layer(config, dtype=BF16):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=dtype))
    quantize_(m, config)
    return m[0]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_taken_apart_and_built_again(name: str) -> None:
    """A view's pieces make a weight with the same values, input quantization and results, whatever layout it was in."""
    config, view = CONFIGS[name]
    linear = layer(config)
    w = linear.weight
    assert isinstance(w, view)
    assert isinstance(w, TorchAOBaseTensor)
    taken = view.take(w)
    assert set(taken) == {
        *view.tensor_data_names, *view.tensor_attribute_names, *view.optional_tensor_data_names,
        *view.optional_tensor_attribute_names,
    }  # fmt: skip
    again = view(**taken)
    assert type(again) is QT
    assert again.dtype is w.dtype
    assert torch.equal(again.dequantize(), w.dequantize())
    assert again.spec.with_(layout="plain") == w.spec.with_(layout="plain")
    assert again.act == w.act
    x = torch.randn(4, 64, dtype=BF16)
    a, b = F.linear(x, again).float(), F.linear(x, w).float()
    assert (a - b).norm() <= 0.01 * b.norm()
    positional = [taken[n] for n in list(inspect.signature(view).parameters)]
    assert torch.equal(view(*positional).dequantize(), w.dequantize())


@pytest.mark.parametrize("name", CONFIGS)
def test_attributes(name: str) -> None:
    config, view = CONFIGS[name]
    w = layer(config).weight
    taken = view.take(w)
    assert torch.equal(w.qdata.view(torch.uint8), taken["qdata"].view(torch.uint8))
    assert w.tensor_data_names == view.tensor_data_names
    assert w.optional_tensor_attribute_names == view.optional_tensor_attribute_names
    if view is not MXTensor and view is not NVFP4Tensor:
        assert list(w.block_size) == list(taken["block_size"])
    if "act_quant_kwargs" in taken:
        assert w.act_quant_kwargs == taken["act_quant_kwargs"]
    if view in (Int8Tensor, IntxUnpackedToInt8Tensor):
        scale = w.scale
        assert scale.shape == tuple(n // b for n, b in zip(w.shape, w.block_size, strict=True))
        zero = 0 if w.zero_point is None else w.zero_point.float().repeat_interleave(w.block_size[1], 1)
        value = (w.qdata.float() - zero) * scale.float().repeat_interleave(w.block_size[1], 1)
        assert torch.equal(value.to(w.dtype), w.dequantize())


def test_slices_are_views_too() -> None:
    w = layer(Int8WeightOnlyConfig()).weight
    piece = w[4:12]
    assert isinstance(piece, Int8Tensor)
    assert torch.equal(piece.qdata, w.qdata[4:12])
    assert torch.equal(piece.scale, w.scale[4:12])
    assert piece.block_size == [1, 64]


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor(), PerGroup(16)])
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
@torch.no_grad()
def test_from_hp_is_what_quantize_stores(granularity, mapping) -> None:
    x = torch.randn(32, 64, dtype=BF16)
    w = Int8Tensor.from_hp(x, granularity, mapping)
    error = (w.dequantize().float() - x.float()).norm() / x.float().norm()
    assert error < 0.02
    linear = nn.Linear(64, 32, bias=False, dtype=BF16)
    linear.weight = nn.Parameter(x)
    if mapping is MappingType.SYMMETRIC:
        quantize_(linear, Int8WeightOnlyConfig(granularity=granularity))
        assert torch.equal(linear.weight.dequantize(), w.dequantize())
    again = Int8Tensor.from_hp(x, granularity, mapping, scale=w.scale, zero_point=w.zero_point)
    assert torch.equal(again.dequantize(), w.dequantize())


@torch.no_grad()
def test_from_hp_of_the_others() -> None:
    x = torch.randn(32, 64, dtype=BF16)
    pairs = [
        (IntxUnpackedToInt8Tensor.from_hp(x, (1, 16), torch.int3), IntxWeightOnlyConfig(torch.int3, PerGroup(16))),
        (Int4Tensor.from_hp(x, [1, 32]), Int4WeightOnlyConfig(group_size=32)),
        (Int4OpaqueTensor.from_hp(x, [1, 32]), Int4WeightOnlyConfig(group_size=32)),
        (Float8Tensor.from_hp(x), Float8WeightOnlyConfig()),
    ]
    for w, config in pairs:
        linear = nn.Linear(64, 32, bias=False, dtype=BF16)
        linear.weight = nn.Parameter(x)
        quantize_(linear, config)
        assert torch.equal(linear.weight.dequantize(), w.dequantize()), config
    assert Float8Tensor.from_hp(torch.zeros(4, 32)).dequantize().isfinite().all()


@torch.no_grad()
def test_activations_by_hand() -> None:
    x = torch.randn(5, 64)
    q = _choose_quant_func_and_quantize_tensor(x, QuantizeTensorToInt8Kwargs(PerRow()))
    assert q.block_size == [1, 64]
    f = _choose_quant_func_and_quantize_tensor(x, QuantizeTensorToFloat8Kwargs())
    assert f.qdata.dtype is torch.float8_e4m3fn
    with pytest.raises(NotImplementedError, match="not supported"):
        _choose_quant_func_and_quantize_tensor(x, None)


def test_bad_pieces_are_refused() -> None:
    q, s = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1)
    with pytest.raises(AssertionError, match="qdata must be int8"):
        Int8Tensor(q.to(torch.int32), s, [1, 32], torch.float32)
    with pytest.raises(AssertionError, match="does not divide"):
        Int8Tensor(q, s, [1, 5], torch.float32)
    with pytest.raises(AssertionError, match="scale must be"):
        IntxUnpackedToInt8Tensor(q, s, q[:, :1], torch.int4, (1, 16), torch.float32, None)
    with pytest.raises(AssertionError, match="target_dtype"):
        IntxUnpackedToInt8Tensor(q, s, q[:, :1], torch.uint4, (1, 32), torch.float32, None)
    with pytest.raises(AssertionError, match="float8"):
        Float8Tensor(q, s)


def test_float_zero_points_that_are_no_codes_keep_their_values() -> None:
    q = torch.randint(-8, 8, (4, 32), dtype=torch.int8)
    scale, zero = torch.rand(4, 1) + 0.5, torch.randn(4, 1)
    w = IntxUnpackedToInt8Tensor(q, scale, zero, torch.int4, (1, 32), torch.float32, None)
    torch.testing.assert_close(w.dequantize(), (q - zero) * scale)


@torch.no_grad()
def test_fqn_to_config_with_the_default_filter() -> None:
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = FqnToConfig({"0": Int8WeightOnlyConfig(), "re:1": None})
    quantize_(m, config)
    assert isinstance(m[0].weight, Int8Tensor)
    assert type(m[1].weight) is nn.Parameter
    assert fqn_matches_fqn_config("0", config)
    assert not fqn_matches_fqn_config("2", config)
    with pytest.raises(ValueError, match="omit filter_fn"):
        quantize_(m, config, lambda mod, fqn: True)


def test_a_weight_that_is_quantized_is_not_quantized_again() -> None:
    m = nn.Sequential(nn.Linear(64, 64))
    quantize_(m, Int8WeightOnlyConfig())
    before = m[0].weight
    assert quantize_(m, Float8WeightOnlyConfig()) is None
    assert m[0].weight is before


@torch.no_grad()
def test_the_report_and_the_compiled_model() -> None:
    torch._dynamo.reset()  # Sequential.forward has been compiled for other models before
    m, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    report = quantize_(m, Int8DynamicActivationInt8WeightConfig())
    assert isinstance(report, pw.Report)
    y = m(x)
    assert torch.equal(torch.compile(m, fullgraph=True)(x), y)


def test_a_quantized_layer_says_so_when_it_is_printed(tmp_path) -> None:
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    quantize_(m, Int8WeightOnlyConfig())
    assert "weight=AffineQuantizedTensor(shape=(32, 64), int8" in str(m)
    torch.save(m, tmp_path / "m.pt")
    assert str(torch.load(tmp_path / "m.pt", weights_only=False)) == str(m)
    pw.inference.freeze_(m)
    assert "int8" in str(m)


@torch.no_grad()
def test_classes_that_pack_for_one_device_have_the_numbers_of_the_plain_ones() -> None:
    x = torch.randn(32, 64, dtype=BF16)
    told = Int4Tensor.from_hp(x, [1, 32]).dequantize()
    for view in (Int4TilePackedTo4dTensor, Int4PlainInt32Tensor, Int4PreshuffledTensor):
        w = view.from_hp(x, [1, 32])
        assert isinstance(w, view)
        assert torch.equal(w.dequantize(), told)
        with pytest.raises(NotImplementedError, match="load it with torchao there"):
            view(w.qdata, w.scale)
    plain = IntxUnpackedToInt8Tensor.from_hp(x, (1, 32), torch.int4)
    assert torch.equal(IntxOpaqueTensor.from_intx_unpacked_to_int8_tensor(plain).dequantize(), plain.dequantize())


def test_granularity_of_int8() -> None:
    assert Int8Tensor._normalize_granularity(None) == (PerRow(), PerRow())
    assert Int8Tensor._normalize_granularity([PerTensor(), PerRow()]) == (PerTensor(), PerRow())
    with pytest.raises(ValueError, match="exactly 2 elements"):
        Int8Tensor._normalize_granularity([PerRow()])
    with pytest.raises(ValueError, match="Invalid granularity type"):
        Int8Tensor._normalize_granularity("rows")
    assert "int8[*]" in layer(Int8WeightOnlyConfig()).weight._quantization_type()


def test_parts_of_a_file_are_checked() -> None:
    """Packing would cut off a code that is too large, and a scale of NaN spoils a row."""
    q, s, z = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int8)
    q[2, 3] = 9
    with pytest.raises(ValueError, match=r"codes of \[4, 32\] range from 0 to 9; int4 supports -8 to 7"):
        IntxUnpackedToInt8Tensor(q, s, z, torch.int4, (1, 32), torch.float32, None)
    with pytest.raises(ValueError, match=r"scale of .* contains NaN or inf"):
        Int8Tensor(q, s * float("nan"), [1, 32], torch.float32)
    with pytest.raises(ValueError, match=r"scale is \[3, 1\]; blocks"):
        Int8Tensor(q, s[:3], [1, 32], torch.float32)
    with pytest.raises(ValueError, match="scale must be one of float32"):
        Int8Tensor(q, s.int(), [1, 32], torch.float32)
    with pytest.raises(ValueError, match=r"scale of .* contains NaN or inf"):
        Float8Tensor(q.to(torch.float8_e4m3fn), s / 0)


def test_asking_what_a_weight_is_unpacks_nothing(monkeypatch) -> None:
    weights = [layer(config).weight for config, _ in CONFIGS.values()]
    monkeypatch.setattr(QT, "plain_parts", lambda w: pytest.fail("a weight was unpacked"))
    for w in weights:
        assert any(isinstance(w, view) for _, view in CONFIGS.values())
