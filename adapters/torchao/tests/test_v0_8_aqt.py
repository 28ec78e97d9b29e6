"""The founding era: AffineQuantizedTensor and what was done with it, as torchao 0.8 to 0.17 spelled it."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pennyweight_torchao.core.config import AOBaseConfig
from pennyweight_torchao.dtypes import (
    AffineQuantizedTensor,
    BlockSparseLayout,
    Float8Layout,
    Int4CPULayout,
    Layout,
    NF4Tensor,
    PlainLayout,
    SemiSparseLayout,
    TensorCoreTiledLayout,
    UintxLayout,
    linear_nf4,
    to_affine_quantized_floatx,
    to_affine_quantized_floatx_static,
    to_affine_quantized_intx,
    to_affine_quantized_intx_static,
    to_nf4,
)
from pennyweight_torchao.dtypes.uintx.plain_layout import PlainAQTTensorImpl
from pennyweight_torchao.quantization import (
    Int4WeightOnlyConfig,
    Int4WeightOnlyQuantizer,
    Int8DynActInt4WeightQuantizer,
    LinearActivationQuantizedTensor,
    MappingType,
    ZeroPointDomain,
    compute_error,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
    register_quantize_module_handler,
    swap_conv2d_1x1_to_linear,
    to_linear_activation_quantized,
    uintx_weight_only,
)
from pennyweight_torchao.quantization.quant_api import _replace_with_custom_fn_if_matches_filter
from pennyweight_torchao.quantization.quant_primitives import (
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

SYM, ASYM = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
EPS = torch.finfo(torch.float32).eps


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, dtype=dtype), nn.Linear(128, 32, dtype=dtype)).eval()


# -- the founding documents, but for the package name ----------------------------------------------------------------


@torch.no_grad()
def test_direct_calls_on_the_weight() -> None:
    m = model(torch.bfloat16)
    quantize_(m, int4_weight_only(group_size=32, layout=Int4CPULayout()))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    w = m[1].weight
    y = m[1].weight._quantized_linear_op(x, m[1].weight, None)
    assert torch.equal(y, F.linear(x, w))
    for other in (x @ w.t(), torch.matmul(x, w.t()), torch.mm(x, w.T), (w @ x.t()).t()):
        assert compute_error(y.float(), other.float()) > 35


def test_the_quantized_data_are_plain() -> None:
    m = model()
    quantize_(m, int8_weight_only())
    for name, param in m.named_parameters():
        if name.endswith("bias"):
            continue
        data = param.tensor_impl.int_data
        assert data.dtype is torch.int8
        value = data.float() * param.tensor_impl.scale
        assert torch.equal(value, param.dequantize())
        assert isinstance(param, AffineQuantizedTensor)
        assert isinstance(param.tensor_impl, PlainAQTTensorImpl)
        assert param.block_size == [1, param.shape[1]]
        assert isinstance(param._layout, PlainLayout)


def test_config_objects_and_a_handler_of_ones_own() -> None:
    m = model()
    quantize_(m, config=int8_weight_only(group_size=128))
    assert m[1].weight.block_size == [1, 128]

    @dataclass
    class MyConfig(AOBaseConfig):
        factor: float

    @register_quantize_module_handler(MyConfig)
    def _handler(module: nn.Module, config: MyConfig) -> nn.Module:
        module.weight = nn.Parameter(module.weight * config.factor)
        return module

    m = model()
    before = m[0].weight.detach().clone()
    quantize_(m, MyConfig(2.0))
    assert torch.equal(m[0].weight, before * 2)


def test_quantize_takes_callables_and_old_arguments() -> None:
    a, b, c = model(), model(), model()
    quantize_(a, int8_weight_only())
    quantize_(b, int8_weight_only(), None, True)  # 0.9: set_inductor_config
    quantize_(b, int8_weight_only(), lambda m, fqn: False, None, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantize_(c, apply_tensor_subclass=lambda m: m)
    assert torch.equal(a[0].weight.dequantize(), b[0].weight.dequantize())
    assert type(c[0].weight) is nn.Parameter
    with pytest.raises(TypeError, match="quantize_ needs a config"):
        quantize_(model(), "int8_weight_only")


# -- constructors ----------------------------------------------------------------------------------------------------

INTX = {
    "int8 symmetric": (SYM, torch.int8, None, None, {}),
    "int8 no clipping": (MappingType.SYMMETRIC_NO_CLIPPING_ERR, torch.int8, None, None, {}),
    "int4 in int8": (SYM, torch.int8, -8, 7, {}),
    "int8 asymmetric": (ASYM, torch.int8, None, None, {}),
    "uint8 symmetric": (SYM, torch.uint8, None, None, {}),
    "uint4 asymmetric": (ASYM, torch.uint4, None, None, {"zero_point_dtype": torch.int32}),
    "uint8 in 0..15": (ASYM, torch.uint8, 0, 15, {}),
    "reduced": (SYM, torch.int8, -127, 127, {"eps": 1e-5}),
}


@pytest.mark.parametrize("name", INTX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (16, 128)])
def test_intx_has_the_numbers_of_the_primitives(name: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    mapping, target, lo, hi, more = INTX[name]
    x = torch.randn(16, 128, dtype=dtype)
    w = to_affine_quantized_intx(x, mapping, block, target, lo, hi, **more)
    eps = more.get("eps", torch.finfo(dtype).eps)
    scale, zero = choose_qparams_affine(x, mapping, block, target, lo, hi, eps)
    codes = quantize_affine(x, block, scale, zero, target, lo, hi)
    told = dequantize_affine(codes, block, scale, zero, codes.dtype, lo, hi, output_dtype=torch.float32)
    assert isinstance(w, AffineQuantizedTensor)
    assert w.dtype is dtype
    assert torch.equal(w.tensor_impl.int_data.to(torch.int32), codes.to(torch.int32))
    assert torch.equal(w.dequantize(torch.float32), told)
    assert torch.equal(w.tensor_impl.scale.flatten(), scale.flatten())
    assert tuple(w.block_size) == block
    static = to_affine_quantized_intx_static(x, scale, zero, block, target, lo, hi)
    assert torch.equal(static.dequantize(), w.dequantize())


def test_tinygemm_has_the_numbers_of_its_primitives() -> None:
    x, block = torch.randn(16, 128, dtype=torch.bfloat16), (1, 32)
    w = to_affine_quantized_intx(
        x, ASYM, block, torch.uint8, 0, 15, 1e-6, None, torch.bfloat16, False, ZeroPointDomain.FLOAT, Int4CPULayout()
    )
    scale, zero = _choose_qparams_affine_tinygemm(x, ASYM, block, torch.uint8, 0, 15, 1e-6, None, torch.bfloat16)
    codes = _quantize_affine_tinygemm(x, block, scale, zero, torch.uint8, 0, 15)
    told = _dequantize_affine_tinygemm(codes, block, scale, zero, torch.uint8, 0, 15, output_dtype=torch.float32)
    assert torch.equal(w.tensor_impl.int_data, codes)
    assert torch.equal(w.dequantize(torch.float32), told)
    assert w.zero_point_domain is ZeroPointDomain.FLOAT
    assert isinstance(w._layout, Int4CPULayout)


def test_float8_and_its_layout() -> None:
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    w = to_affine_quantized_floatx(x, (1, 64), torch.float8_e4m3fn, Float8Layout())
    scale = (x.abs().amax(1, keepdim=True) / 448).float()  # in the dtype of x, as torchao does
    told = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(w.dequantize(torch.float32), told)
    assert isinstance(w._layout, Float8Layout)
    static = to_affine_quantized_floatx_static(x, scale.flatten(), (1, 64), torch.float8_e4m3fn, Float8Layout())
    assert torch.equal(static.dequantize(), w.dequantize())


def test_errors_of_the_constructors() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match=r"ZeroPointDomain\.NONE instead of None"):
        to_affine_quantized_intx_static(x, torch.ones(4), None, (1, 32), torch.int8, zero_point_domain=None)
    with pytest.raises(ValueError, match="zero_point should be None"):
        to_affine_quantized_intx_static(
            x, torch.ones(4), torch.zeros(4), (1, 32), torch.int8, zero_point_domain=ZeroPointDomain.NONE
        )
    with pytest.raises(AssertionError, match="out of bound"):
        to_affine_quantized_intx(x, SYM, (1, 32), torch.int8, -200, 127)
    with pytest.raises((AssertionError, RuntimeError)):
        to_affine_quantized_intx(x, SYM, (1, 5), torch.int8)
    for layout in (SemiSparseLayout(), BlockSparseLayout()):  # pruned or not, the values are stored dense
        w = to_affine_quantized_intx(x, SYM, (1, 32), torch.int8, _layout=layout)
        plain = to_affine_quantized_intx(layout.pre_process(x), SYM, (1, 32), torch.int8)
        assert torch.equal(w.dequantize(), plain.dequantize())
        assert int8_dynamic_activation_int8_weight(layout=layout).layout == layout
    with pytest.raises(ValueError, match="use_hqq=True needs zero_point_domain FLOAT"):
        Int4WeightOnlyConfig(use_hqq=True, zero_point_domain=ZeroPointDomain.INT)


def test_layouts_are_taken_in_every_position() -> None:
    assert Int4WeightOnlyConfig(64, Int4CPULayout()).layout == Int4CPULayout()
    assert Int4WeightOnlyConfig(64, TensorCoreTiledLayout(8)).set_inductor_config is True
    assert int8_dynamic_activation_int8_weight(PlainLayout()).act_mapping_type is SYM
    assert repr(TensorCoreTiledLayout(inner_k_tiles=4)) == "TensorCoreTiledLayout(inner_k_tiles=4)"
    m = model()
    quantize_(m, uintx_weight_only(torch.uint4, group_size=32))
    assert isinstance(m[0].weight._layout, UintxLayout)
    with pytest.raises(ValueError, match="layout must be a Layout"):
        Int4WeightOnlyConfig(layout="plain")


def test_integer_zero_points_for_int4() -> None:
    m = model()
    quantize_(m, Int4WeightOnlyConfig(group_size=32, zero_point_domain=ZeroPointDomain.INT))
    w = m[0].weight
    assert w.zero_point is not None
    assert w.zero_point_domain is ZeroPointDomain.INT


class DoublingLayout(Layout):
    """Stores its scales doubled and its codes as they are."""

    def post_process(self, input, scale, zero_point, block_size):
        return input, scale * 2, zero_point


def test_a_layout_of_ones_own_has_its_say() -> None:
    from pennyweight_torchao.dtypes.affine_quantized_tensor import PlainAQTTensorImpl, register_layout

    @register_layout(DoublingLayout)
    class DoublingImpl(PlainAQTTensorImpl):
        pass

    x = torch.randn(4, 32)
    plain, double = (to_affine_quantized_intx(x, SYM, (1, 32), torch.int8, _layout=layout())
                     for layout in (PlainLayout, DoublingLayout))  # fmt: skip
    assert torch.equal(double.dequantize(), plain.dequantize() * 2)


# -- activations -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_weights_under_quantized_inputs() -> None:
    m, x = model(), torch.randn(5, 64)
    quantize_(m, int8_dynamic_activation_int4_weight(group_size=32))
    w = m[0].weight
    assert isinstance(w, LinearActivationQuantizedTensor)
    assert not isinstance(w, AffineQuantizedTensor)
    inner = w.original_weight_tensor
    assert isinstance(inner, AffineQuantizedTensor)
    again = to_linear_activation_quantized(inner, w.input_quant_func)
    assert again.act == w.act
    assert torch.equal(F.linear(x, again), F.linear(x, w))
    by_hand = F.linear(w.input_quant_func(x).dequantize(), inner.dequantize())
    assert compute_error(by_hand, F.linear(x, w)) > 60


@torch.no_grad()
def test_a_function_of_ones_own_before_the_product() -> None:
    x, inner = torch.randn(5, 64), to_affine_quantized_intx(torch.randn(16, 64), SYM, (1, 64), torch.int8)
    w = to_linear_activation_quantized(inner, lambda t, by: t * by, {"by": 3.0})
    told = F.linear(x * 3, inner)
    assert torch.equal(F.linear(x, w), told)
    assert torch.equal(F.linear(x, copy.deepcopy(w)), told)
    layer = nn.Linear(64, 16, bias=False)
    layer.weight = nn.Parameter(w, requires_grad=False)
    assert torch.equal(layer(x), told)


# -- NF4, module swap, and the rest -----------------------------------------------------------------------------------


def test_nf4() -> None:
    w = torch.randn(128, 128)
    q = to_nf4(w, 64, 64)
    assert isinstance(q, NF4Tensor)
    assert torch.equal(q.get_original_weight(), q.dequantize())
    assert q.n_blocks == 256
    assert compute_error(w, q.dequantize()) > 19
    x = torch.randn(3, 128, requires_grad=True)
    y = linear_nf4(x, q)
    y.sum().backward()
    assert torch.allclose(x.grad, q.dequantize().sum(0).expand(3, 128), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("mapping", [SYM, ASYM])
def test_8da4w_by_module_swap(mapping: MappingType) -> None:
    m, x = model(), torch.randn(5, 64)
    told = m(x)
    state = Int8DynActInt4WeightQuantizer(groupsize=32, mapping_type=mapping).quantize(m).state_dict()
    assert {k: v.dtype for k, v in state.items()}["0.weight"] is torch.int8
    assert state["0.scales"].shape == state["0.zeros"].shape == (128, 2)
    assert compute_error(told, m(x)) > 12
    other = Int8DynActInt4WeightQuantizer(groupsize=32).quantize(model())
    other.load_state_dict(state)
    assert torch.equal(other(x), m(x))
    m[0].scales.mul_(2)  # a buffer that changes is seen
    assert not torch.equal(other(x), m(x))


@torch.no_grad()
def test_int4_by_module_swap() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 16)).bfloat16()
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    told = m(x)
    Int4WeightOnlyQuantizer(groupsize=32).quantize(m)
    assert m[0].weight.shape == (64, 128)
    assert m[0].scales_and_zeros.shape == (8, 64, 2)
    assert type(m[1]) is nn.Linear  # it has a bias
    assert compute_error(told.float(), m(x).float()) > 15


def test_module_swaps_by_hand() -> None:
    m = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    x = torch.randn(2, 8, 5, 5)
    told = m(x)
    swap_conv2d_1x1_to_linear(m)
    assert type(m[0]) is not nn.Conv2d
    assert type(m[2]) is nn.Conv2d
    assert torch.allclose(m(x), told, atol=1e-6)
    m = model()
    seen = []
    _replace_with_custom_fn_if_matches_filter(
        m, lambda mod: nn.Identity(), lambda mod, fqn: seen.append(fqn) or fqn == "1"
    )
    assert seen == ["", "0", "1"]
    assert type(m[1]) is nn.Identity
