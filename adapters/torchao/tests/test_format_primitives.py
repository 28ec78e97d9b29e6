"""float8 and small-float primitives: shapes, errors, gradients, zero blocks, every code of every width."""

import pytest
import torch

from pennyweight_torchao.format_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _expand_scale_to_tensor_shape,
    _maybe_expand_scale_to_tensor_shape,
    _quantize_affine_float8,
    choose_qparams_affine_float8,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_zero_blocks_stay_zero(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """torchao's scale of a zero block is 0, and the block becomes NaN."""
    x = torch.randn(4, 32).to(dtype)
    x[1] = 0
    scale = _choose_scale_float8(x, (1, 16), E4M3, scale_dtype)
    assert (scale.shape, scale.dtype) == ((4, 2), torch.float32)
    assert (scale > 0).all()
    back = _dequantize_affine_float8(_quantize_affine_float8(x, scale, E4M3), scale, dtype)
    assert back.isfinite().all()
    assert (back[1] == 0).all()
    assert (_quantize_affine_float8(x, torch.zeros(()), E4M3).float() == 0).all()


def test_float8_scales_by_hand() -> None:
    x = torch.tensor([[1.0, -448.0], [896.0, 2.0]])
    assert _choose_scale_float8(x, (1, 2)).tolist() == [[1.0], [2.0]]
    assert _choose_scale_float8(x, (2, 2)).tolist() == [[2.0]]
    assert _choose_scale_float8(x, (1, -1)).tolist() == [[1.0], [2.0]]
    assert float(_choose_scale_float8(x, [])) == 2.0
    assert float(choose_qparams_affine_float8(x, E5M2)) == 896 / 57344
    assert _choose_scale_float8(x, (1, 2), hp_value_ub=448.0).tolist() == [[1.0], [1.0]]
    assert _choose_scale_float8(x, (1, 2), hp_value_lb=896.0).tolist() == [[2.0], [2.0]]
    assert _choose_scale_float8(x * 1.3, (1, 2), scale_dtype=torch.float8_e8m0fnu).tolist() == [[1.0], [2.0]]
    assert _quantize_affine_float8(x * 10, torch.ones(())).float().tolist() == [[10.0, -448.0], [448.0, 20.0]]


def test_float8_errors() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(AssertionError, match="float8_e8m0fnu"):
        _choose_scale_float8(x, (1, 32), E4M3, torch.bfloat16)
    with pytest.raises(AssertionError, match="divisible"):
        _choose_scale_float8(x, (1, 5))
    with pytest.raises(ValueError, match="Scale tensor has 1 dimensions but target has 2"):
        _quantize_affine_float8(x, torch.ones(2))
    with pytest.raises(ValueError, match="Dimension 1: target size 32 is not evenly divisible by scale size 5"):
        _quantize_affine_float8(x, torch.ones(4, 5))


def test_expanding_scales() -> None:
    scale = torch.tensor([[1.0, 2.0]])
    assert _expand_scale_to_tensor_shape(scale, (2, 4)).tolist() == [[1, 1, 2, 2]] * 2
    row = torch.ones(4, 1)
    assert _maybe_expand_scale_to_tensor_shape(row, (4, 32)) is row
    assert _expand_scale_to_tensor_shape(row, (4, 32)).shape == (4, 32)
    one = torch.ones(())
    assert _expand_scale_to_tensor_shape(one, (4, 32)) is one


def test_float8_gradients_pass_the_cast() -> None:
    x = torch.tensor([[0.3, 500.0, -2.0]], requires_grad=True)
    codes = _quantize_affine_float8(x, torch.ones(()))
    codes.to(torch.float32).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0, 1.0]]  # what saturates has none
