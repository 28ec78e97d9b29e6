"""torch.ops.torchao: schemas, values, gradients, what exported graphs keep."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight_torchao
from pennyweight_torchao.operators.affine import OPERATORS, define

# Schemas in torchao 0.18; of the float8 ones without "non_decomposed" in 0.12.
SCHEMAS = {
    "choose_qparams_affine": "(Tensor input, str mapping_type, SymInt[] block_size, ScalarType target_dtype, Scalar? "
    "quant_min=None, Scalar? quant_max=None, float? eps=None, ScalarType? scale_dtype=None, ScalarType? "
    "zero_point_dtype=None, bool keepdim=False) -> (Tensor, Tensor)",
    "quantize_affine": "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType output_dtype, "
    "Scalar? quant_min=None, Scalar? quant_max=None) -> Tensor",
    "dequantize_affine": "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType "
    "input_dtype, Scalar? quant_min=None, Scalar? quant_max=None, ScalarType output_dtype=6) -> Tensor",
    "choose_scale_float8": "(Tensor tensor, SymInt[] block_size, ScalarType float8_dtype=24, ScalarType scale_dtype=6, "
    "float? hp_value_lb=None, float? hp_value_ub=None) -> Tensor",
    "quantize_affine_float8_non_decomposed": "(Tensor tensor, Tensor scale, ScalarType float8_dtype=24) -> Tensor",
    "dequantize_affine_float8_non_decomposed": "(Tensor tensor, Tensor scale, ScalarType output_dtype=6) -> Tensor",
}


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_torchaos(name: str) -> None:
    assert str(getattr(torch.ops.torchao, name).default._schema) == f"torchao::{name}{SCHEMAS[name]}"


def test_operators_compute_what_the_functions_do(torchao: ModuleType) -> None:
    from torchao.quantization import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    ops, x = torch.ops.torchao, torch.randn(5, 48)
    for mapping in MappingType:
        want = choose_qparams_affine(x, mapping, (1, 16), torch.int8, -8, 7)
        got = ops.choose_qparams_affine(x, mapping.name, (1, 16), torch.int8, -8, 7)
        assert all(map(torch.equal, got, want))
        codes = ops.quantize_affine(x, (1, 16), *want, torch.int8, -8, 7)
        assert torch.equal(codes, quantize_affine(x, (1, 16), *want, torch.int8, -8, 7))
        back = ops.dequantize_affine(codes, (1, 16), *want, torch.int8, -8, 7, output_dtype=torch.bfloat16)
        assert torch.equal(
            back, dequantize_affine(codes, (1, 16), *want, torch.int8, -8, 7, output_dtype=torch.bfloat16)
        )
    scale = ops.choose_scale_float8(x, [1, 48])
    assert torch.equal(scale, _choose_scale_float8(x, (1, 48)))
    got = ops.quantize_affine_float8_non_decomposed(x, scale)
    assert torch.equal(got.float(), _quantize_affine_float8(x, scale).float())
    assert torch.equal(ops.dequantize_affine_float8(got, scale), got.float() * scale)
    with pytest.raises(ValueError, match=r"mapping_type must be one of SYMMETRIC.*'symmetric'"):
        ops.choose_qparams_affine(x, "symmetric", [1, 48], torch.int8)


def test_they_take_meta_tensors(torchao: ModuleType) -> None:
    x = torch.randn(4, 32, device="meta")
    scale, zero = torch.ops.torchao.choose_qparams_affine(x, "ASYMMETRIC", [1, 16], torch.uint8, keepdim=True)
    codes = torch.ops.torchao.quantize_affine(x, [1, 16], scale, zero, torch.uint8)
    assert (scale.shape, codes.shape, codes.dtype, codes.is_meta) == ((4, 2), (4, 32), torch.uint8, True)


def test_they_are_defined_once_and_stay() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pennyweight_torchao, "_CLIENTS", ())
        pennyweight_torchao.install()
    define()  # a second time: nothing
    assert all(hasattr(torch.ops.torchao, name) for name in OPERATORS)
    held = torch.ops.torchao.dequantize_affine.default
    pennyweight_torchao.uninstall()
    codes, scale = torch.tensor([[3, -4]], dtype=torch.int8), torch.tensor([[0.5]])
    assert held(codes, [1, 2], scale, None, torch.int8).tolist() == [[1.5, -2.0]]  # in graphs that were made before
    assert held is torch.ops.torchao.dequantize_affine.default


class Layer(nn.Linear):
    def __init__(self, **options: Any) -> None:
        super().__init__(32, 4)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from pennyweight_torchao.quantization import (
            MappingType,
            choose_qparams_affine,
            dequantize_affine,
            quantize_affine,
        )

        scale, zero = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 32), torch.int8, **self.options)
        codes = quantize_affine(x, (1, 32), scale, zero, torch.int8)
        x = dequantize_affine(codes, (1, 32), scale, zero, torch.int8, output_dtype=x.dtype)
        return super().forward(x)


def _ops(layer: nn.Module) -> list[str]:
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(3, 32),))
    x = torch.randn(3, 32)
    assert torch.allclose(program.module()(x), layer(x))
    return [str(n.target) for n in program.graph.nodes if "torchao" in str(n.target)]


def test_exported_graphs_keep_them(torchao: ModuleType) -> None:
    kept = ["choose_qparams_affine", "quantize_affine", "dequantize_affine"]
    assert _ops(Layer()) == [f"torchao.{name}.default" for name in kept]
    assert _ops(Layer(preserve_zero=False)) == [f"torchao.{name}.default" for name in kept[1:]]  # no such argument


def test_graphs_do_not_have_them_without_the_alias() -> None:
    assert _ops(Layer()) == []


def test_wrappers_of_torchs_operators(torchao: ModuleType) -> None:
    import torchao._executorch_ops as served

    x = torch.randn(3, 32)
    scale, zero = served._quantized_decomposed_choose_qparams_per_token_asymmetric_wrapper(x, torch.int8)
    args = (scale, zero, -128, 127, torch.int8)
    codes = served._quantized_decomposed_quantize_per_token_wrapper(x, *args)
    back = served._quantized_decomposed_dequantize_per_token_wrapper(codes, *args, torch.float32)
    assert torch.equal(codes, (x * (1 / scale)).round().add(zero).clamp(-128, 127).to(torch.int8))
    assert (back - x).abs().max() <= scale.max()
    scales, zeros = torch.full((3, 2), 0.1), torch.zeros(3, 2, dtype=torch.int32)
    groups = served._quantized_decomposed_quantize_per_channel_group_wrapper(x, scales, zeros, -8, 7, torch.int8, 16)
    assert torch.equal(groups, (x * (1 / scales.repeat_interleave(16, 1))).round().clamp(-8, 7).to(torch.int8))
    values = served._quantized_decomposed_dequantize_per_channel_group_wrapper(
        groups, scales, zeros, -8, 7, torch.int8, 16, torch.float32
    )
    assert torch.equal(values, groups * scales.repeat_interleave(16, 1))


def test_the_module_of_torchaos_operators_is_explained(torchao: ModuleType) -> None:
    with pytest.raises(ImportError, match=r"F\.linear with a quantized weight"):
        from torchao.ops import swizzle_mm  # noqa: F401
