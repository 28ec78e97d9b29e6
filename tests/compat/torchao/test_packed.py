"""Packings, classes and configs of torchao's weights for one kernel or GPU."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import pennyweight as pw
from pennyweight.compat.torchao.dtypes import (
    AffineQuantizedTensor,
    FbgemmFp8Tensor,
    FbgemmInt4Tensor,
    Int4GroupwisePreshuffleTensor,
    MarlinQQQLayout,
    MarlinQQQTensor,
    to_affine_quantized_fpx,
    to_affine_quantized_intx,
    to_affine_quantized_packed_linear_int8_dynamic_activation_intx_weight,
    to_fbgemm_fp8,
    to_fbgemm_int4,
    to_marlinqqq_quantized_intx,
)
from pennyweight.compat.torchao.dtypes.floatx.float8_layout import preprocess_scale
from pennyweight.compat.torchao.dtypes.floatx.floatx_tensor_core_layout import (
    FloatxTensorCoreAQTTensorImpl,
    FloatxTensorCoreLayout,
    from_scaled_tc_floatx,
    pack_tc_floatx,
    to_scaled_tc_floatx,
    unpack_tc_floatx,
)
from pennyweight.compat.torchao.dtypes.uintx.bitpacking import abs_lsh, abs_rsh
from pennyweight.compat.torchao.dtypes.uintx.gemlite_layout import GemlitePackedLayout, get_gemlite_aqt_kwargs
from pennyweight.compat.torchao.dtypes.uintx.marlin_qqq_tensor import MarlinQQQAQTTensorImpl
from pennyweight.compat.torchao.dtypes.uintx.packed_linear_int8_dynamic_activation_intx_weight_layout import (
    Target,
    target_from_str,
    target_to_str,
)
from pennyweight.compat.torchao.dtypes.uintx.uint4_layout import PerChannelSymmetricWeightUInt4Tensor, UInt4Tensor
from pennyweight.compat.torchao.prototype.custom_fp_utils import _floatx_unpacked_to_f32
from pennyweight.compat.torchao.prototype.dtypes import BitnetTensor, UInt2Tensor, bitnet, uint2, uintgen
from pennyweight.compat.torchao.quantization import FbgemmConfig, Int4Tensor, quantize_
from pennyweight.compat.torchao.quantization.marlin_qqq import (
    marlin_qqq_workspace,
    pack_to_marlin_qqq,
    unpack_from_marlin_qqq,
)
from pennyweight.compat.torchao.quantization.quant_primitives import (
    ZeroPointDomain,
    _choose_qparams_and_quantize_affine_qqq,
    _dequantize_affine_qqq,
)

GOLDEN = Path(__file__).parents[2] / "golden"
TOLD = load_file(GOLDEN / "torchao_dtypes_0.9.safetensors")
CASES = json.loads((GOLDEN / "torchao_dtypes_0.9.json").read_text(encoding="utf-8"))


def told(case: str) -> dict[str, torch.Tensor]:
    return {k.rpartition(".")[2]: v for k, v in TOLD.items() if k.rpartition(".")[0] == case}


# -- floatx ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ebits", "mbits"), CASES["floatx"])
def test_tensor_core_order(ebits: int, mbits: int) -> None:
    t, bits = told(f"floatx.{ebits}_{mbits}"), 1 + ebits + mbits
    assert torch.equal(pack_tc_floatx(t["codes"], bits), t["packed"])
    assert torch.equal(unpack_tc_floatx(t["packed"], bits), t["codes"])
    packed, scale = to_scaled_tc_floatx(t["weight"], ebits, mbits)
    assert torch.equal(packed, t["packed_weight"])
    assert torch.equal(scale, t["scale"])
    assert scale.dtype is t["weight"].dtype
    numbers = _floatx_unpacked_to_f32(unpack_tc_floatx(packed, bits), ebits, mbits)
    assert torch.equal(from_scaled_tc_floatx(packed, ebits, mbits), numbers)
    assert torch.equal(from_scaled_tc_floatx(packed, ebits, mbits, scale), numbers * scale.float().unsqueeze(1))


def test_tensor_cores_take_multiples_of_64() -> None:
    with pytest.raises(AssertionError, match=r"multiples of 64, got \[64, 32\]"):
        pack_tc_floatx(torch.zeros(64, 32, dtype=torch.uint8), 6)
    with pytest.raises(AssertionError, match="1 to 7 bits, got 8"):
        pack_tc_floatx(torch.zeros(64, 64, dtype=torch.uint8), 8)
    with pytest.raises(AssertionError, match="must be uint8"):
        unpack_tc_floatx(torch.zeros(64, 48), 6)


@pytest.mark.parametrize(("ebits", "mbits"), [(3, 2), (2, 3), (3, 1), (2, 2), (2, 1)])
def test_weights_of_small_floats(ebits: int, mbits: int) -> None:
    """The class holds what torchao's functions compute: codes, scale, value, packed data."""
    x = torch.randn(64, 128, dtype=torch.float16)
    layout = FloatxTensorCoreLayout(ebits, mbits)
    w = to_affine_quantized_fpx(x, layout)
    impl = w.tensor_impl
    assert isinstance(w, AffineQuantizedTensor)
    assert isinstance(impl, FloatxTensorCoreAQTTensorImpl)
    assert impl.get_layout() == layout
    values = from_scaled_tc_floatx(impl.packed_floatx_data, ebits, mbits, impl.scale.flatten())
    assert torch.equal(w.dequantize(), values.half())
    assert w.error(x) > {6: 24, 5: 18, 4: 13}[1 + ebits + mbits]
    again = AffineQuantizedTensor(
        FloatxTensorCoreAQTTensorImpl(impl.packed_floatx_data, impl.scale.flatten(), layout), (1, 128), x.shape,
        dtype=torch.float16,
    )  # fmt: skip
    assert torch.equal(again.dequantize(), w.dequantize())
    y = F.linear(x[:3], w)
    assert (y - F.linear(x[:3], values.half())).norm() < 1e-2 * y.norm()


def test_only_small_floats_have_packed_floats() -> None:
    w = pw.AffineQuantizedTensor.from_float(torch.randn(64, 64), pw.QuantSpec(pw.get_format("int8"), (-1,)))
    with pytest.raises(AttributeError, match=r"packed_floatx_data: .* this weight is int8"):
        _ = w.tensor_impl.packed_floatx_data
    with pytest.raises(NotImplementedError, match="floats of 4 and 2 bits; supported"):
        to_affine_quantized_fpx(torch.randn(64, 64), FloatxTensorCoreLayout(4, 2))


@pytest.mark.parametrize(("ebits", "mbits"), [(3, 1), (2, 2)])
def test_configs_of_five_bits(ebits: int, mbits: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    x = model[0].weight.detach().clone()
    pw.quantize_(model, pw.FPXWeightOnlyConfig(ebits, mbits))
    w = to_affine_quantized_fpx(x, FloatxTensorCoreLayout(ebits, mbits))
    assert torch.equal(model[0].weight.dequantize(), w.dequantize())


def test_scales_of_scaled_products() -> None:
    assert preprocess_scale(torch.tensor(2.0), (4, 8)).tolist() == [[2.0]]
    assert preprocess_scale(torch.ones(3), (3, 8)).shape == (3, 1)
    assert preprocess_scale(torch.arange(6.0).view(2, 3), (2, 3, 8)).flatten().tolist() == [0, 1, 2, 3, 4, 5]


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 8))
def test_bit_fields(bits: int) -> None:
    t = told(f"uintgen.{bits}")
    pack, unpack = getattr(uintgen, f"pack_uint{bits}"), getattr(uintgen, f"unpack_uint{bits}")
    assert torch.equal(pack(t["codes"]), t["packed"])
    assert torch.equal(unpack(t["packed"]), t["codes"])
    matrix = t["codes"].view(4, -1)
    assert torch.equal(unpack(pack(matrix)), matrix)
    shape = getattr(uintgen, f"down_size_uint{bits}")(matrix.shape)
    assert tuple(pack(matrix).shape) == shape
    assert getattr(uintgen, f"up_size_uint{bits}")(shape) == tuple(matrix.shape)
    with pytest.raises(AssertionError, match="not divisible by"):
        pack(torch.zeros(7, dtype=torch.uint8))


def test_shifts() -> None:
    assert (abs_lsh(4, 1), abs_lsh(4, -1), abs_lsh(4, 0)) == (8, 2, 4)
    assert (abs_rsh(4, 1), abs_rsh(4, -1)) == (2, 8)
    assert abs_lsh(torch.tensor([3], dtype=torch.uint8), 2).tolist() == [12]


# -- Marlin-QQQ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", CASES["marlin_qqq"])
def test_marlin_qqq_packing(group_size: int) -> None:
    t = told(f"marlin_qqq.{group_size}")
    given = t["codes"].to(torch.int32), t["s_group"], t["s_channel"]
    packed = pack_to_marlin_qqq(*given, 4, group_size)
    for ours, theirs in zip(packed, (t["packed"], t["packed_group"], t["packed_channel"]), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    for ours, theirs in zip(unpack_from_marlin_qqq(*packed, t["codes"].shape, 4, group_size), given, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(AssertionError, match="supports 4 bits, got 8"):
        pack_to_marlin_qqq(*given, 8, group_size)
    with pytest.raises(AssertionError, match="no multiples of 16"):
        pack_to_marlin_qqq(t["codes"][:-1], *given[1:], 4, group_size)
    assert marlin_qqq_workspace(256).eq(0).sum() == 64


@pytest.mark.parametrize("group_size", [128, 256])
def test_marlin_qqq_weights(group_size: int) -> None:
    x = torch.randn(64, 256, dtype=torch.float16)
    w = to_marlinqqq_quantized_intx(x, (1, group_size), 0, 15, ZeroPointDomain.NONE, MarlinQQQLayout())
    codes, s_group, s_channel, _ = _choose_qparams_and_quantize_affine_qqq(x, 4, group_size)
    assert isinstance(w, MarlinQQQTensor)
    assert torch.equal(w.dequantize(), _dequantize_affine_qqq(codes, s_group, s_channel, 4, group_size))
    group = s_group.t().contiguous() if s_group.numel() else s_group
    packed = pack_to_marlin_qqq(codes.t().contiguous(), group, s_channel.t().contiguous(), 4, group_size)
    impl = MarlinQQQAQTTensorImpl(*packed, MarlinQQQLayout(), (256, 64), group_size, 4)
    again = MarlinQQQTensor(impl, (1, group_size), x.shape, 0, 15, dtype=torch.float16)
    assert torch.equal(again.dequantize(), w.dequantize())
    with pytest.raises(ValueError, match=r"ZeroPointDomain.NONE instead of None"):
        to_marlinqqq_quantized_intx(x, (1, 128), 0, 15, None)
    with pytest.raises(AssertionError, match="Unsupported groupsize = 64"):
        to_marlinqqq_quantized_intx(x, (1, 64), 0, 15)


# -- FBGEMM ------------------------------------------------------------------------------------------------------------


def test_fbgemm_classes() -> None:
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    w = to_fbgemm_int4(x, [1, 128])
    assert isinstance(w, FbgemmInt4Tensor)
    assert torch.equal(w.dequantize(), Int4Tensor.from_hp(x, [1, 128]).dequantize())
    assert torch.equal(Int4GroupwisePreshuffleTensor.from_float(x, [1, 128]).dequantize(), w.dequantize())
    parts = Int4Tensor.take(w)
    again = FbgemmInt4Tensor(parts["qdata"], parts["scale"], parts["zero_point"], 128, x.shape)
    assert torch.equal(again.dequantize(), w.dequantize())
    with pytest.raises(AssertionError, match="one number for each axis"):
        to_fbgemm_int4(x, [128])
    f = to_fbgemm_fp8(x)
    assert isinstance(f, FbgemmFp8Tensor)
    assert not isinstance(w, FbgemmFp8Tensor)
    assert f.error(x) > 28
    same = FbgemmFp8Tensor(f.tensor_impl.int_data, f.tensor_impl.scale, torch.tensor([1200.0]), torch.bfloat16)
    assert torch.equal(same.dequantize(), f.dequantize())
    with pytest.raises(NotImplementedError, match=r"activation_scale_ub=4.0: inputs are not clamped"):
        to_fbgemm_fp8(x, 4.0)


@pytest.mark.parametrize(
    ("dtypes", "more", "kind"),
    [
        ((torch.bfloat16, torch.int4, torch.bfloat16), {"block_size": [1, 128]}, FbgemmInt4Tensor),
        ((torch.bfloat16, torch.int4, torch.bfloat16), {"block_size": [1, 64], "preshuffle": True}, FbgemmInt4Tensor),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16), {}, FbgemmFp8Tensor),
    ],
)
def test_fbgemm_config(dtypes: tuple, more: dict, kind: type) -> None:
    model = nn.Sequential(nn.Linear(256, 32, dtype=torch.bfloat16))
    x = model[0].weight.detach().clone()
    quantize_(model, FbgemmConfig(*dtypes, **more))
    assert isinstance(model[0].weight, kind)
    direct = to_fbgemm_int4(x, more["block_size"]) if more else to_fbgemm_fp8(x)
    assert torch.equal(model[0].weight.dequantize(), direct.dequantize())
    assert model(torch.randn(3, 256, dtype=torch.bfloat16)).isfinite().all()


def test_wrong_fbgemm_configs() -> None:
    with pytest.raises(NotImplementedError, match="is not supported; supported are"):
        FbgemmConfig(torch.float16, torch.int8, torch.float16)
    with pytest.raises(ValueError, match=r"needs block_size=\[1, group\]"):
        FbgemmConfig(torch.bfloat16, torch.int4, torch.bfloat16)


# -- packed for ARM, gemlite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_linear(bits: int) -> None:
    lo, hi = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.randint(lo, hi + 1, (8, 64))
    scale = torch.rand(8, 2) + 0.1
    zero = torch.randint(lo, hi + 1, (8, 2))
    make = to_affine_quantized_packed_linear_int8_dynamic_activation_intx_weight
    w = make(codes, scale, zero, None, getattr(torch, f"int{bits}"), "universal")
    value = (codes - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    assert torch.equal(w.dequantize(), value)
    with pytest.raises(AssertionError, match=f"int_data from .* is not within {lo} to {hi}"):
        make(codes + hi - lo + 1, scale, zero, None, getattr(torch, f"int{bits}"))
    with pytest.raises(AssertionError, match="scale is"):
        make(codes, scale[:4], zero, None, getattr(torch, f"int{bits}"))
    with pytest.raises(ValueError, match="bias stays in the layer"):
        make(codes, scale, zero, torch.zeros(8), getattr(torch, f"int{bits}"))


def test_targets() -> None:
    assert [target_from_str(target_to_str(t)) for t in Target] == [*Target]
    assert target_from_str("KleidiAI") is Target.KLEIDIAI
    with pytest.raises(ValueError, match="Invalid target: cuda; expected one of auto, universal"):
        target_from_str("cuda")


@pytest.mark.parametrize(("bits", "group", "hqq"), [(4, 64, True), (8, None, False)])
def test_gemlite(bits: int, group: int | None, hqq: bool) -> None:
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    kwargs = get_gemlite_aqt_kwargs(x, group, bits, use_hqq=hqq)
    assert kwargs["_layout"] == GemlitePackedLayout(group or 128, bits)
    w = to_affine_quantized_intx(x, **kwargs)
    assert w.error(x) > (18 if bits == 4 else 40)
    with pytest.raises(AssertionError, match="bit_width 4,8 but got 3"):
        get_gemlite_aqt_kwargs(x, 64, 3)


def test_protocols() -> None:
    from pennyweight.compat.torchao.quantization import Int8StaticActivationInt8WeightConfig
    from pennyweight.compat.torchao.quantization.quantize_.common import (
        IsStaticQuantizationConfig,
        SupportsActivationPreScaling,
    )

    w = pw.AffineQuantizedTensor.from_float(torch.randn(4, 64), pw.QuantSpec(pw.get_format("int8"), (-1,)))
    assert isinstance(w, SupportsActivationPreScaling)
    assert not isinstance(torch.zeros(1), SupportsActivationPreScaling)
    config = Int8StaticActivationInt8WeightConfig(0.5, granularity=(pw.PerTensor(), pw.PerRow()))
    assert isinstance(config, IsStaticQuantizationConfig)
    assert not isinstance(pw.Int8WeightOnlyConfig(), IsStaticQuantizationConfig)
    kwargs = config.get_act_quant_kwargs()
    assert (kwargs.granularity, kwargs.mapping_type) == (pw.PerTensor(), pw.MappingType.SYMMETRIC)


# -- integers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [UInt4Tensor, UInt2Tensor])
def test_packed_integers(cls: type) -> None:
    x = torch.randint(0, 1 << cls.bits, (4, 16), dtype=torch.uint8)
    w = cls.from_unpacked(x)
    assert w.shape == x.shape
    assert w.elem.shape == (4, 16 * cls.bits // 8)
    for dtype in (torch.uint8, torch.int64, torch.float32):
        assert torch.equal(w.to(dtype), x.to(dtype))
        assert type(w.to(dtype)) is torch.Tensor
    assert w.tolist() == x.tolist()
    unit = 8 // cls.bits
    cases = [
        (w.view(8, 8), x.view(8, 8)), (w.view(-1), x.view(-1)), (w.t(), x.t()), (w.transpose(0, 1), x.t()),
        (w[1:3], x[1:3]), (w[:, unit : 3 * unit], x[:, unit : 3 * unit]), (w[2], x[2]), (w.clone(), x),
        (w.detach(), x), (w.unbind(0)[1], x[1]), (w.to("cpu"), x), (copy.deepcopy(w), x), (w[:, ::1], x),
    ]  # fmt: skip
    for ours, plain in cases:
        assert type(ours) is cls
        assert torch.equal(ours.to(torch.uint8), plain)
    assert torch.equal(torch.stack(w.unbind(1), 1), x)
    assert torch.equal(w.view(torch.uint8), x)
    assert w == cls.from_unpacked(x.clone())
    assert w != cls.from_unpacked((x + 1) % (1 << cls.bits))
    assert torch.equal(w, cls.from_unpacked(x))
    assert f"dtype=torch.uint{cls.bits}" in repr(w)
    with pytest.raises(NotImplementedError, match=f"1:{unit}:1 of a {cls.__name__} cuts bytes"):
        w[:, 1:unit]
    with pytest.raises(AssertionError, match="not divisible by"):
        w.view(64 * unit // (unit + 1), -1) if 64 % (unit + 1) == 0 else w.view(64, 1)
    with pytest.raises(AssertionError, match="holds bytes"):
        cls(torch.zeros(4))


def test_bitnet_integers() -> None:
    x = torch.randn(8, 16)
    w = BitnetTensor.from_float(x)
    assert isinstance(w, UInt2Tensor)
    assert torch.equal(w.to(torch.float32), x.sign() + 1)
    a = torch.randn(3, 16)
    told = a @ (x.sign() + 1).t()
    assert torch.allclose(torch.mm(a, w.t()), told, atol=1e-5)
    assert torch.allclose(F.linear(a, w, torch.ones(8)), told + 1, atol=1e-5)


def test_handlers_of_integers() -> None:
    class Mine(BitnetTensor):
        pass

    w = BitnetTensor.from_float(torch.randn(8, 16))
    assert torch.equal(
        bitnet.mm(torch.ops.aten.mm.default, (torch.ones(1, 16), w.t()), {}), w.to(torch.float32).sum(1)[None]
    )
    assert torch.equal(uint2.unbind(torch.ops.aten.unbind.int, (w, 0), None)[0].to(torch.uint8), w.plain()[0])

    @uint2.implemented_by(Mine, [torch.ops.aten.relu.default])
    def relu(func, args, kwargs):
        return torch.tensor(7.0)

    assert torch.relu(Mine(w.elem)) == 7
    with pytest.raises(NotImplementedError, match=r"aten\.relu"):
        torch.relu(w)


def test_uint4_weights_per_channel() -> None:
    x = torch.randn(8, 16)
    w = PerChannelSymmetricWeightUInt4Tensor.from_float(x)
    scale = x.abs().amax(1) / 7.5
    codes = (x / scale.unsqueeze(1)).round().clamp(0, 15)
    assert torch.equal(w.scales, scale)
    assert torch.equal(w.to(torch.float32), codes)
    a = torch.randn(3, 16)
    told = a @ (codes * scale.unsqueeze(1)).t()
    assert torch.allclose(F.linear(a, w), told, atol=1e-4)
    assert torch.allclose(F.linear(a, w, torch.ones(8)), told + 1, atol=1e-4)
    assert torch.equal(w.clone().scales, scale)
