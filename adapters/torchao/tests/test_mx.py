"""torchao.prototype.mx_formats: codes and scales bit-equal to torchao's, and its tensor classes as views of ours."""

import copy
import io
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pennyweight.core.numerics import quantize
from pennyweight.core.spec import MXFP4, MXFP8
from pennyweight.io.codecs.torchao.mx import SUPPORTED_ELEM_DTYPES, swap_halves
from pennyweight_torchao.enums import KernelPreference, MXGemmKernelChoice, NVFP4MMConfig, ScaleCalculationMode
from pennyweight_torchao.prototype.mx_formats import utils
from pennyweight_torchao.prototype.mx_formats.config import _validate_kernel_preference
from pennyweight_torchao.prototype.mx_formats.mx_tensor import (
    MXTensor,
    QuantizeTensorToMXKwargs,
    _to_mx_rceil,
    get_fp_scale,
    to_dtype,
    to_mx,
)
from pennyweight_torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    QuantizeTensorToNVFP4Kwargs,
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)
from pennyweight_torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)

FOLDER = Path(__file__).parent / "golden"
GOLDEN = load_file(str(FOLDER / "torchao_0.18_mx.safetensors"))
ELEMENTS = dict(zip(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), SUPPORTED_ELEM_DTYPES, strict=True))
MX_CASES = sorted(k.removesuffix(".qdata") for k in GOLDEN if k.startswith("mx.") and k.endswith(".qdata"))
NV_CASES = sorted(k.removesuffix(".qdata") for k in GOLDEN if k.startswith("nv.") and k.endswith(".qdata"))
every_element = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


def raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5))
    )


# -- bit-equal to torchao ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MX_CASES)
def test_to_mx(case: str) -> None:
    _, name, short, mode = case.split(".")
    x, element = GOLDEN[f"x.{name}"], ELEMENTS[short]
    scale, codes = to_mx(x, element, 32, ScaleCalculationMode(mode))
    assert scale.dtype is torch.float8_e8m0fnu
    assert torch.equal(raw(scale), GOLDEN[f"{case}.scale"])
    # NaN in fp4 and fp6 is left to chance by torchao, and its scale says NaN anyway
    known = torch.ones_like(x, dtype=torch.bool)
    if short in ("e2m3", "e3m2", "e2m1"):
        known = ~x.isnan().reshape(x.shape[0], -1, 32).any(-1).repeat_interleave(32, 1)
    known = known[:, ::2] if short == "e2m1" else known
    assert torch.equal(raw(codes)[known], GOLDEN[f"{case}.qdata"][known])
    w = MXTensor.to_mx(x, element, 32, ScaleCalculationMode(mode))
    assert torch.equal(raw(w.qdata), raw(codes))
    assert torch.equal(raw(w._scale_e8m0), raw(scale))
    if f"{case}.value" in GOLDEN:
        want = GOLDEN[f"{case}.value"]
        assert same(to_dtype(codes, scale, element, 32, torch.float32), want)
        saturated = want.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
        assert same(w.dequantize(torch.float32), saturated)


@every_element
def test_swizzled(element) -> None:
    short = next(s for s, e in ELEMENTS.items() if e == element)
    x, want = GOLDEN["x.normal"], GOLDEN[f"mx.normal.{short}.floor.swizzled"]
    swizzled, codes = to_mx(x, element, 32, is_swizzled_scales=True)
    assert torch.equal(raw(swizzled), want)
    assert tuple(swizzled.shape) == utils.hp_data_dims_to_swizzled_scale_dims_mx(*x.shape)
    plain = MXTensor.to_mx(x, element)
    again = MXTensor(codes, swizzled, element, 32, torch.float32, is_swizzled_scales=True)
    assert torch.equal(again.dequantize(), plain.dequantize())
    assert MXTensor.to_mx(x, element, is_swizzled_scales=True).is_swizzled_scales is False  # kept in order


@pytest.mark.parametrize("case", NV_CASES)
def test_to_nvfp4(case: str) -> None:
    _, name, levels = case.split(".")
    x, outer = GOLDEN[f"x.{name}"], GOLDEN.get(f"{case}.outer")
    assert (outer is None) == (levels == "1")
    scale, codes = nvfp4_quantize(x, 16, outer)
    known = ~x.isnan().reshape(x.shape[0], -1, 16).any(-1).repeat_interleave(8, 1)
    assert torch.equal(raw(scale), GOLDEN[f"{case}.scale"])
    assert torch.equal(codes[known], GOLDEN[f"{case}.qdata"][known])
    w = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
    assert torch.equal(raw(w._scale_e4m3), raw(scale))
    if f"{case}.value" in GOLDEN:
        finite = x.isfinite().reshape(x.shape[0], -1, 16).all(-1).repeat_interleave(16, 1)
        assert same(w.dequantize(torch.float32)[finite], GOLDEN[f"{case}.value"][finite])
    if outer is not None:
        assert torch.equal(w.per_tensor_scale, outer)
        assert torch.equal(w.get_hp_scales()[finite_scales(x)], (outer * scale.float())[finite_scales(x)])


def finite_scales(x: Tensor) -> Tensor:
    return x.isfinite().reshape(x.shape[0], -1, 16).all(-1)


def test_a_batch_of_experts() -> None:
    x, outer = GOLDEN["experts.x"], GOLDEN["experts.outer"]
    w = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
    assert torch.equal(w.qdata, GOLDEN["experts.qdata"])
    assert torch.equal(raw(w._scale_e4m3), GOLDEN["experts.scale"])
    assert torch.equal(w.dequantize(), GOLDEN["experts.value"])
    assert torch.equal(w.per_tensor_scale, outer)
    one = w[1]
    assert isinstance(one, NVFP4Tensor)
    assert torch.equal(one.dequantize(), w.dequantize()[1])
    assert torch.equal(one.per_tensor_scale, outer[1].reshape(()))
    y = torch.randn(3, 5, 64)
    torch.testing.assert_close(torch.bmm(y, w.transpose(-2, -1)), torch.bmm(y, w.dequantize().transpose(1, 2)))
    with pytest.raises(ValueError, match=r"per_tensor_scale must be one number, or \[E, 1, 1\]"):
        NVFP4Tensor(w.qdata, w._scale_e4m3, 16, torch.float32, outer[:2])


def test_finite_blocks_have_the_scales_of_our_rules() -> None:
    x = torch.randn(64, 64) * torch.exp2(torch.randint(-40, 40, (64, 1)).float())
    for mode in ScaleCalculationMode:
        for element, spec in ((torch.float8_e4m3fn, MXFP8), (torch.float4_e2m1fn_x2, MXFP4)):
            ours = quantize(x, spec, f"mx_{mode.value}")
            scale, _ = to_mx(x, element, 32, mode)
            assert torch.equal(ours.scale.codes, raw(scale)), (mode, element)


def test_rceil_by_hand() -> None:
    top = torch.tensor([448.0, 449.0, 0.0, math.inf, math.nan, 2.0**-140])
    exponent, scaled = _to_mx_rceil(top, top, 448.0)
    assert exponent.tolist() == [127, 128, 0, 254, 255, 0]
    assert scaled[:4].tolist() == [448.0, 224.5, 0.0, 448.0]
    assert scaled[4].isnan()
    assert scaled[5] == 2.0**-140  # byte 0 is not applied
    assert get_fp_scale(torch.tensor([0, 127, 254, 255], dtype=torch.uint8)).tolist()[:3] == [2.0**-127, 1.0, 2.0**127]


# -- codes, packing, layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_packed_fp6_has_the_values_of_unpacked(name: str) -> None:
    x, element = torch.randn(4, 64), ELEMENTS[name]
    scale, codes = to_mx(x, element, 32)
    _, packed = to_mx(x, element, 32, pack_fp6=True)
    assert packed.shape == (4, 48)
    want = to_dtype(codes, scale, element, 32, torch.bfloat16)
    assert torch.equal(to_dtype(packed, scale, element, 32, torch.bfloat16, False, True), want)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (256, 9)])
def test_blocked(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 255, shape, dtype=torch.uint8)
    blocked = utils.to_blocked(scale)
    high, wide = -(-shape[0] // 128), -(-shape[1] // 4)
    assert blocked.shape == (high * wide * 512,)
    for i, j in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0)):  # cuBLAS's formula
        tile = (i // 128) * wide + j // 4
        assert blocked[tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4] == scale[i, j]
    assert torch.equal(utils.from_blocked(blocked, *shape), scale)
    assert torch.equal(utils.from_blocked(blocked.view(high * 32, -1), *shape), scale)
    with pytest.raises(ValueError, match="swizzled scale of"):
        utils.from_blocked(blocked, shape[0] + 128, shape[1])


def test_sizes_of_swizzled_scales() -> None:
    assert utils.ceil_div(7, 3) == 3
    assert utils.hp_data_dims_to_swizzled_scale_dims_nvfp4(130, 70) == (64, 32)


def swizzled_nvfp4(x: Tensor, outer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales in tensor-core order, and codes."""
    scale, codes = nvfp4_quantize(x, 16, outer)
    flat = utils.to_blocked(raw(scale)).view(scale.dtype)
    return flat.view(utils.hp_data_dims_to_swizzled_scale_dims_nvfp4(*x.shape)), codes


def test_wrong_data() -> None:
    x = torch.randn(4, 64)
    with pytest.raises(AssertionError, match=r"must be bfloat16 or float32, got torch\.float16"):
        to_mx(x.half(), torch.float8_e4m3fn, 32)
    with pytest.raises(AssertionError, match="not a multiple of the block size 48"):
        to_mx(x, torch.float8_e4m3fn, 48)
    with pytest.raises(AssertionError, match=r"call .contiguous\(\)"):
        to_mx(x.t(), torch.float8_e4m3fn, 2)
    with pytest.raises(AssertionError, match="elem_dtype must be one of float8_e4m3fn"):
        to_mx(x, torch.int8, 32)
    with pytest.raises(AssertionError, match="blocks of 16, got block_size=32"):
        nvfp4_quantize(x, 32)
    with pytest.raises(AssertionError, match="rows are a multiple of 128"):
        to_mx(torch.randn(2, 3, 32), torch.float8_e4m3fn, 32, is_swizzled_scales=True)
    with pytest.raises(TypeError, match="unknown arguments"):
        MXTensor.to_mx(x, torch.float8_e4m3fn, no_such=1)


# -- tensors -----------------------------------------------------------------------------------------------------------


@every_element
def test_an_mx_tensor_behaves(element) -> None:
    x = torch.randn(8, 96)
    w = MXTensor.to_mx(x, element, gemm_kernel_choice=None)
    value = w.dequantize()
    assert w.elem_dtype == element
    assert (w.block_size, w.orig_dtype, w.act_quant_kwargs) == (32, torch.float32, None)
    assert w.kernel_preference is KernelPreference.EMULATED
    assert w.qdata.shape == (8, 48 if element is torch.float4_e2m1fn_x2 else 96)
    assert torch.equal(w.scale.dequantize(), get_fp_scale(w._scale_e8m0))
    assert torch.equal(w.get_hp_scales(), get_fp_scale(w._scale_e8m0))
    assert torch.equal(w.to_dtype(torch.bfloat16), value.bfloat16())
    assert not hasattr(w, "per_tensor_scale")
    batch = w.view(2, 4, 96)
    pieces = {
        "transposed": (w.t(), value.t()), "rows": (w[2:6], value[2:6]), "columns": (w[:, 32:], value[:, 32:]),
        "batch": (batch, value.view(2, 4, 96)), "matrix": (batch[1], value[4:]), "clone": (w.clone(), value),
        "copy": (copy.deepcopy(w), value),
    }  # fmt: skip
    for piece, want in pieces.values():
        assert isinstance(piece, MXTensor)
        assert torch.equal(piece.dequantize(), want)
        again = MXTensor(piece.qdata, piece._scale_e8m0, element, 32, torch.float32)
        assert torch.equal(again.dequantize(), want)
    assert w.t().qdata.shape == w.qdata.t().shape
    y = torch.randn(5, 96)
    torch.testing.assert_close(F.linear(y, w), F.linear(y, value))
    torch.testing.assert_close(torch.mm(y, w.t()), y @ value.t())
    torch.testing.assert_close(torch.addmm(torch.ones(8), y, w.t()), 1 + y @ value.t())
    both = MXTensor.to_mx(y, element)
    torch.testing.assert_close(torch.mm(both, w.t()), both.dequantize() @ value.t())


def test_an_nvfp4_tensor_behaves() -> None:
    x = torch.randn(8, 96)
    for outer in (None, per_tensor_amax_to_scale(x.abs().max())):
        w = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
        value = w.dequantize()
        assert (w.block_size, w.orig_dtype, w.use_triton_kernel, w.is_swizzled_scales) == (
            16,
            torch.float32,
            False,
            False,
        )
        assert w.act_per_tensor_scale is None
        assert w._scale_e4m3.dtype is torch.float8_e4m3fn
        assert torch.equal(w.get_hp_scales(), w._scale_e4m3.float() * (1 if outer is None else outer))
        for piece, want in (
            (w.t(), value.t()),
            (w[2:6], value[2:6]),
            (w[:, 32:64], value[:, 32:64]),
            (w.view(2, 4, 96), value.view(2, 4, 96)),
        ):
            assert isinstance(piece, NVFP4Tensor)
            assert torch.equal(piece.dequantize(), want)
            again = NVFP4Tensor(piece.qdata, piece._scale_e4m3, 16, torch.float32, piece.per_tensor_scale)
            assert torch.equal(again.dequantize(), want)
        swizzled = swizzled_nvfp4(x, outer)[0]
        again = NVFP4Tensor(w.qdata, swizzled, 16, torch.float32, outer, is_swizzled_scales=True)
        assert torch.equal(again.dequantize(), value)


def test_quantized_inputs() -> None:
    """A weight says how its input is quantized; the product is that of both dequantized."""
    x, y = torch.randn(8, 96), torch.randn(5, 96)
    mx = MXTensor.to_mx(x, torch.float8_e4m3fn, act_quant_kwargs=QuantizeTensorToMXKwargs(torch.float8_e5m2))
    a = MXTensor.to_mx(y, torch.float8_e5m2).dequantize()
    torch.testing.assert_close(F.linear(y, mx), F.linear(a, mx.dequantize()))
    assert mx.act_quant_kwargs == QuantizeTensorToMXKwargs(torch.float8_e5m2)
    for kwargs, static in (
        (QuantizeTensorToNVFP4Kwargs(), None),
        (QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True), None),
        (QuantizeTensorToNVFP4Kwargs(), torch.tensor(0.001)),
    ):
        w = NVFP4Tensor.to_nvfp4(x, act_per_tensor_scale=static, act_quant_kwargs=kwargs)
        assert w.act_quant_kwargs == kwargs
        outer = per_tensor_amax_to_scale(y.abs().max()) if kwargs.use_dynamic_per_tensor_scale else static
        a = NVFP4Tensor.to_nvfp4(y, per_tensor_scale=outer).dequantize()
        torch.testing.assert_close(F.linear(y, w), F.linear(a, w.dequantize()), rtol=1e-3, atol=1e-3)
        assert (w.act_per_tensor_scale is None) == (static is None)
        torch.testing.assert_close(torch.mm(y, w.t()), F.linear(y, w))
    old = NVFP4Tensor.to_nvfp4(x, mm_config=NVFP4MMConfig.DYNAMIC)
    assert old.act_quant_kwargs == QuantizeTensorToNVFP4Kwargs()
    with pytest.raises(ValueError, match="needs act_quant_kwargs"):
        NVFP4Tensor.to_nvfp4(x, act_per_tensor_scale=torch.tensor(0.1))
    both = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True)
    with pytest.raises(ValueError, match="would not be used"):
        NVFP4Tensor.to_nvfp4(x, act_per_tensor_scale=torch.tensor(0.1), act_quant_kwargs=both)


def test_checks_of_torchao() -> None:
    _validate_kernel_preference(KernelPreference.AUTO, 32, torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=r"in blocks of 64; use KernelPreference\.EMULATED"):
        _validate_kernel_preference(KernelPreference.AUTO, 64, torch.float8_e4m3fn)


def test_saved_and_loaded() -> None:
    kwargs = QuantizeTensorToNVFP4Kwargs()
    w = NVFP4Tensor.to_nvfp4(torch.randn(8, 32), act_per_tensor_scale=torch.tensor(0.5), act_quant_kwargs=kwargs)
    flat, metadata = flatten_tensor_state_dict({"a.weight": w})
    assert sorted(flat) == ["a._weight_act_per_tensor_scale", "a._weight_qdata", "a._weight_scale"]
    (again,) = unflatten_tensor_state_dict(flat, metadata)[0].values()
    assert torch.equal(again.dequantize(), w.dequantize())
    assert again.act == w.act
    assert torch.equal(again.act_scale, w.act_scale)
    file = io.BytesIO()
    torch.save({"w": w}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["w"].act == w.act
    with pytest.raises(ValueError, match="transposed"):
        flatten_tensor_state_dict({"w": w.t()})


@pytest.mark.usefixtures("torchao")
@torch.no_grad()
def test_what_torchao_saved() -> None:
    weights = torch.load(FOLDER / "torchao_0.18_mx.pt", weights_only=True)
    for name, w in weights.items():
        assert isinstance(w, MXTensor if name.startswith("mx") else NVFP4Tensor)
        assert torch.equal(w.dequantize(), GOLDEN[f"pickle.{name}"]), name
    assert weights["mxfp8"].act_quant_kwargs.scaling_mode is ScaleCalculationMode.RCEIL
    assert weights["nvfp4"].act_quant_kwargs is None
    assert weights["nvfp4_static"].act_quant_kwargs == QuantizeTensorToNVFP4Kwargs()
    assert weights["nvfp4_static"].act_per_tensor_scale == GOLDEN["pickle.nvfp4_static.act"]


def test_pickles_of_older_releases() -> None:
    """Their attributes had other names, the codes of fp6 were packed, and of two fp4 codes the even one was high."""
    x = torch.randn(4, 64)
    for element in ELEMENTS.values():
        scale, codes = to_mx(x, element, 32, pack_fp6=True)
        codes = swap_halves(codes) if element is torch.float4_e2m1fn_x2 else codes
        state = {
            "_scale_e8m0": scale, "_data": codes, "_elem_dtype": element, "_block_size": 32,
            "_orig_dtype": torch.float32, "_use_fp4_custom_triton_dequant_kernel": False,
            "_gemm_kernel_choice": MXGemmKernelChoice.EMULATED, "_pack_fp6": True,
        }  # fmt: skip
        w = MXTensor.restore(state, x)
        assert torch.equal(w.dequantize(), MXTensor.to_mx(x, element).dequantize())
    scale, codes = swizzled_nvfp4(x)
    codes = swap_halves(codes)
    state = {
        "_scale_e4m3": scale, "_is_swizzled_scales": True, "_per_tensor_scale": None, "_data": codes, "_block_size": 16,
        "_orig_dtype": torch.bfloat16, "mm_config": NVFP4MMConfig.DYNAMIC, "use_triton_kernel": True,
    }  # fmt: skip
    w = NVFP4Tensor.restore(state, x)
    assert torch.equal(w.dequantize(), NVFP4Tensor.to_nvfp4(x).dequantize().bfloat16())
    assert w.act_quant_kwargs == QuantizeTensorToNVFP4Kwargs()


def test_bad_pieces() -> None:
    w = MXTensor.to_mx(torch.randn(4, 64), torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match=r"scale is \[4, 1\]; blocks of 32 are \[4, 2\]"):
        MXTensor(w.qdata, w._scale_e8m0[:, :1], torch.float4_e2m1fn_x2, 32, torch.float32)
    with pytest.raises(ValueError, match="qdata must be float8_e4m3fn"):
        MXTensor(w.qdata, w._scale_e8m0, torch.float8_e4m3fn, 32, torch.float32)
    with pytest.raises(AssertionError, match="the dtype of its elements"):
        MXTensor.from_qdata_and_scales(w.qdata, w._scale_e8m0, torch.float32)
    with pytest.raises(ValueError, match="scale must be float8_e4m3fn"):
        NVFP4Tensor(w.qdata, w._scale_e8m0, 16, torch.float32)
    e4m3 = MXTensor.to_mx(torch.randn(4, 64), torch.float8_e4m3fn)
    again = MXTensor.from_qdata_and_scales(e4m3.qdata, e4m3._scale_e8m0, torch.bfloat16)
    assert torch.equal(again.dequantize(), e4m3.dequantize().bfloat16())


@pytest.mark.parametrize("mode", ScaleCalculationMode, ids=lambda m: m.value)
def test_compiled(mode: ScaleCalculationMode) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 64)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            MXTensor.to_mx(x, torch.float4_e2m1fn_x2, scaling_mode=mode).dequantize(),
            NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())).dequantize(),
        )

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(x), both(x)))


def test_under_another_default_dtype_and_without_values() -> None:
    x = torch.randn(4, 64)
    want = [MXTensor.to_mx(x, e, scaling_mode=m) for e in ELEMENTS.values() for m in ScaleCalculationMode]
    torch.set_default_dtype(torch.float64)
    try:
        got = [MXTensor.to_mx(x, e, scaling_mode=m) for e in ELEMENTS.values() for m in ScaleCalculationMode]
        assert all(torch.equal(raw(a.qdata), raw(b.qdata)) for a, b in zip(got, want, strict=True))
        assert all(a.dequantize().dtype is torch.float32 for a in got)
        assert NVFP4Tensor.to_nvfp4(x, per_tensor_scale=torch.tensor(0.01)).per_tensor_scale.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    empty = x.to("meta")
    assert MXTensor.to_mx(empty, torch.float8_e4m3fn).is_meta
    assert NVFP4Tensor.to_nvfp4(empty).qdata.shape == (4, 32)
