"""Functions on tensors: scales and zero points, quantize, dequantize, fake quantize, groupwise, int8 products."""

from __future__ import annotations

from typing import Any

import torch

from adapters.torchao.tests.snippets.table import normal, raised, snippet


def _affine(mapping: str, dtype: torch.dtype, block: tuple[int, ...], *bounds: int, **more: Any) -> dict[str, Any]:
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    x = normal(8, 64, seed=3)
    scale, zero = choose_qparams_affine(x, MappingType[mapping], block, dtype, *bounds, **more)
    codes = quantize_affine(x, block, scale, zero, dtype, *bounds)
    values = dequantize_affine(codes, block, scale, zero, dtype, *bounds, output_dtype=torch.float32)
    return {"scale": scale, "zero": zero, "codes": codes, "values": values}


@snippet()
def symmetric_per_row() -> dict[str, Any]:
    return _affine("SYMMETRIC", torch.int8, (1, 64))


@snippet()
def asymmetric_per_row() -> dict[str, Any]:
    return _affine("ASYMMETRIC", torch.int8, (1, 64))


@snippet()
def symmetric_in_groups_of_four_bits() -> dict[str, Any]:
    return _affine("SYMMETRIC", torch.int8, (1, 32), -8, 7)


@snippet()
def asymmetric_unsigned_four_bits() -> dict[str, Any]:
    return _affine("ASYMMETRIC", torch.uint8, (1, 16), 0, 15)


@snippet()
def no_clipping_error() -> dict[str, Any]:
    return _affine("SYMMETRIC_NO_CLIPPING_ERR", torch.int8, (1, 64), -8, 7)


@snippet()
def per_tensor() -> dict[str, Any]:
    return _affine("SYMMETRIC", torch.int8, (8, 64))


@snippet()
def with_an_eps_and_dtypes() -> dict[str, Any]:
    return _affine("ASYMMETRIC", torch.int8, (1, 64), eps=0.1, scale_dtype=torch.float32, zero_point_dtype=torch.int32)


@snippet()
def blocks_of_two_axes() -> dict[str, Any]:
    return _affine("ASYMMETRIC", torch.uint8, (4, 16), 0, 255)


@snippet()
def from_a_known_range() -> dict[str, Any]:
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine_with_min_max

    scale, zero = choose_qparams_affine_with_min_max(
        torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 3.0]), MappingType.ASYMMETRIC, (1, 4), torch.int8
    )
    return {"scale": scale, "zero": zero}


@snippet(differs={"mask": "False where the value is clamped; torchao's is computed after clamping: always True"})
def fake_quantized() -> dict[str, Any]:
    from torchao.quantization.quant_primitives import _fake_quantize_affine, _fake_quantize_affine_cachemask

    x, scale, zero = normal(4, 8, seed=4) * 3, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    y, mask = _fake_quantize_affine_cachemask(x, (1, 8), scale, zero, torch.int8, -8, 7)
    return {
        "y": _fake_quantize_affine(x, (1, 8), scale, zero, torch.int8, -8, 7),
        "same": torch.equal(x, y),
        "mask": mask,
    }


@snippet("0.12")
def tinygemm_scales_and_zeros() -> dict[str, Any]:
    from torchao.quantization.utils import (
        get_groupwise_affine_qparams,
        groupwise_affine_quantize_tensor,
    )

    w = normal(8, 64, seed=5, dtype=torch.bfloat16)
    scale, zero = get_groupwise_affine_qparams(w, 4, 32)
    return {"scale": scale, "zero": zero, "packed": groupwise_affine_quantize_tensor(w, 4, 32)[1]}


@snippet()
def per_token_and_per_channel() -> dict[str, Any]:
    from torchao.quantization.utils import dynamically_quantize_per_channel, per_token_dynamic_quant

    x = normal(5, 64, seed=6)
    codes, scale, zero = dynamically_quantize_per_channel(x, -128, 127, torch.int8)
    return {"codes": codes, "scale": scale, "zero": zero, "tokens": per_token_dynamic_quant(x)}


@snippet()
def int8_products() -> dict[str, Any]:
    from torchao.kernel.intmm import int_scaled_matmul, safe_int_mm

    a = (normal(5, 32, seed=7) * 40).round().clamp(-128, 127).to(torch.int8)
    b = (normal(32, 16, seed=8) * 40).round().clamp(-128, 127).to(torch.int8)
    return {"sums": safe_int_mm(a, b), "scaled": int_scaled_matmul(a, b, normal(5, 1, seed=9))}


@snippet()
def error_in_decibels() -> dict[str, Any]:
    from torchao.quantization.utils import compute_error

    x = normal(64, seed=10)
    return {"db": compute_error(x, x + 0.01).round(decimals=3), "same": compute_error(x, x)}


@snippet()
def block_size_of_a_granularity() -> dict[str, Any]:
    from torchao.quantization import PerAxis, PerGroup, PerRow, PerTensor, PerToken
    from torchao.quantization.utils import get_block_size

    each = (PerTensor(), PerAxis(0), PerAxis(1), PerGroup(16), PerRow(), PerToken())
    return {"sizes": [list(get_block_size((4, 8, 64), g)) for g in each]}


@snippet()
def float8_scales_and_codes() -> dict[str, Any]:
    from torchao.quantization.quant_primitives import (
        _choose_scale_float8,
        _dequantize_affine_float8,
        _quantize_affine_float8,
    )

    x = normal(4, 16, seed=11)
    scale = _choose_scale_float8(x, (1, 16), torch.float8_e4m3fn)
    codes = _quantize_affine_float8(x, scale, torch.float8_e4m3fn)
    return {
        "scale": scale,
        "codes": codes.view(torch.uint8),
        "values": _dequantize_affine_float8(codes, scale, torch.float32),
    }


@snippet()
def tinygemm_numbers() -> dict[str, Any]:
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _dequantize_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    x = normal(4, 64, seed=13)
    scale, zero = _choose_qparams_affine_tinygemm(x, MappingType.ASYMMETRIC, (1, 32), torch.int32, 0, 15, eps=1e-6)
    codes = _quantize_affine_tinygemm(x, (1, 32), scale, zero, torch.int32, 0, 15)
    values = _dequantize_affine_tinygemm(codes, (1, 32), scale, zero, torch.int32, 0, 15, output_dtype=torch.float32)
    return {"scale": scale, "zero": zero, "codes": codes, "values": values}


@snippet()
def operators_of_the_torchao_namespace() -> dict[str, Any]:
    import torchao.quantization.quant_primitives  # noqa: F401 - registers them

    ops, x = torch.ops.torchao, normal(4, 32, seed=14)
    scale, zero = ops.choose_qparams_affine(x, "ASYMMETRIC", [1, 32], torch.int8, -128, 127, None, None, None)
    codes = ops.quantize_affine(x, [1, 32], scale, zero, torch.int8, -128, 127)
    values = ops.dequantize_affine(codes, [1, 32], scale, zero, torch.int8, -128, 127)
    return {"scale": scale, "zero": zero, "codes": codes, "values": values}


@snippet()
def a_block_that_does_not_divide() -> dict[str, Any]:
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine

    call = lambda: choose_qparams_affine(normal(4, 30), MappingType.SYMMETRIC, (1, 32), torch.int8)  # noqa: E731
    return {"error": raised(call) != "nothing"}
