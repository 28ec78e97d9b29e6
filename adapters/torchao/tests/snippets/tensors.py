"""Operations on quantized tensors, classes of both eras, conversions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adapters.torchao.tests.snippets.table import Y, inputs, mlp, normal, snippet


def _weight() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig())
    return model[0].weight


@snippet(approx=Y)
def made_from_a_float_tensor() -> dict[str, Any]:
    from torchao.quantization import Int8Tensor, PerRow

    w = Int8Tensor.from_hp(normal(16, 64, seed=2), PerRow())
    return {"codes": w.qdata, "scale": w.scale, "is": isinstance(w, Int8Tensor), "y": F.linear(inputs(), w)}


@snippet()
def float8_from_a_float_tensor() -> dict[str, Any]:
    from torchao.quantization import Float8Tensor, PerRow

    w = Float8Tensor.from_hp(normal(16, 64, seed=2), float8_dtype=torch.float8_e4m3fn, granularity=PerRow())
    return {"codes": w.qdata.view(torch.uint8), "scale": w.scale, "is": isinstance(w, Float8Tensor)}


@snippet()
def intx_from_a_float_tensor() -> dict[str, Any]:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    w = IntxUnpackedToInt8Tensor.from_hp(normal(16, 64, seed=2), (1, 32), torch.int4)
    return {"codes": w.qdata, "scale": w.scale, "target": w.target_dtype, "block": list(w.block_size)}


@snippet()
def from_its_parts() -> dict[str, Any]:
    from torchao.quantization import Int8Tensor

    codes = torch.arange(-32, 32, dtype=torch.int8).reshape(4, 16)
    w = Int8Tensor(codes, torch.full((4, 1), 0.5), [1, 16], torch.float32)
    return {"values": w.dequantize(), "codes": w.qdata}


@snippet()
def isinstance_of_a_parameter_and_its_data() -> dict[str, Any]:
    from torchao.quantization import Float8Tensor, Int8Tensor
    from torchao.utils import TorchAOBaseTensor

    w = _weight()
    return {
        "parameter": isinstance(w, Int8Tensor),
        "data": isinstance(w.data, Int8Tensor),
        "other": isinstance(w, Float8Tensor),
        "base": isinstance(w, TorchAOBaseTensor),
        "tensor": isinstance(w, torch.Tensor),
    }


@snippet()
def a_slice_of_rows() -> dict[str, Any]:
    w = _weight().data[8:24]
    return {"codes": w.qdata, "scale": w.scale, "shape": w.shape, "values": w.dequantize()}


@snippet()
def detach_clone_and_to() -> dict[str, Any]:
    w = _weight().data
    return {
        "detached": w.detach().dequantize(),
        "cloned": w.clone().qdata,
        "moved": w.to("cpu").qdata,
        "contiguous": w.contiguous().qdata,
    }


@snippet(differs={"dtype": "the asked one; torchao keeps the tensor's"})
def another_dtype() -> dict[str, Any]:
    w = _weight().data.to(torch.bfloat16)
    return {"dtype": w.dtype, "codes": w.qdata}


@snippet(approx=Y)
def products() -> dict[str, Any]:
    w = _weight()
    return {"y": F.linear(inputs(), w, normal(32, seed=3)), "one": F.linear(inputs(1), w).shape}


@snippet()
def copied_into() -> dict[str, Any]:
    from torchao.quantization import Int8Tensor, PerRow

    a, b = (Int8Tensor.from_hp(normal(8, 32, seed=s), PerRow()) for s in (1, 2))
    a.copy_(b)
    return {"values": a.dequantize(), "same": torch.equal(a.qdata, b.qdata)}


@snippet()
def flattened() -> dict[str, Any]:
    w = _weight().data
    names, _ = w.__tensor_flatten__()
    return {"count": len(names) >= 2, "tensors": all(isinstance(getattr(w, n), torch.Tensor) for n in names)}


@snippet("0.12")
def an_affine_tensor_of_the_older_era() -> dict[str, Any]:
    from torchao.dtypes import AffineQuantizedTensor, to_affine_quantized_intx
    from torchao.quantization.quant_primitives import MappingType

    w = to_affine_quantized_intx(
        normal(8, 64, seed=4), MappingType.SYMMETRIC, (1, 64), torch.int8, eps=torch.finfo(torch.float32).eps
    )
    codes, scale, _zero = w.tensor_impl.get_plain()
    return {
        "is": isinstance(w, AffineQuantizedTensor),
        "codes": codes,
        "scale": scale.flatten(),
        "values": w.dequantize(),
        "block": list(w.block_size),
        "shape": w.shape,
    }


@snippet("0.12")
def asymmetric_of_the_older_era() -> dict[str, Any]:
    from torchao.dtypes import to_affine_quantized_intx
    from torchao.quantization.quant_primitives import MappingType

    w = to_affine_quantized_intx(normal(8, 64, seed=4), MappingType.ASYMMETRIC, (1, 32), torch.uint8, 0, 15)
    codes, scale, zero = w.tensor_impl.get_plain()
    return {"codes": codes, "scale": scale, "zero": zero.to(torch.int32), "values": w.dequantize()}


@snippet("0.12")
def floatx_of_the_older_era() -> dict[str, Any]:
    from torchao.dtypes import Float8Layout, to_affine_quantized_floatx

    w = to_affine_quantized_floatx(
        normal(8, 64, seed=4),
        block_size=(1, 64),
        target_dtype=torch.float8_e4m3fn,
        _layout=Float8Layout(mm_config=None),
    )
    return {"values": w.dequantize()}


@snippet("0.12", approx=Y)
def a_linear_with_quantized_inputs() -> dict[str, Any]:
    from torchao.dtypes import to_affine_quantized_intx
    from torchao.quantization import to_linear_activation_quantized
    from torchao.quantization.quant_api import _int8_asymm_per_token_quant
    from torchao.quantization.quant_primitives import MappingType

    w = to_affine_quantized_intx(normal(8, 64, seed=4), MappingType.SYMMETRIC, (1, 64), torch.int8)
    w = to_linear_activation_quantized(w, _int8_asymm_per_token_quant)
    return {"y": F.linear(inputs(), w)}


@snippet("0.12")
def layouts_are_data_classes() -> dict[str, Any]:
    from torchao.dtypes import Layout, PlainLayout, SemiSparseLayout, TensorCoreTiledLayout

    return {
        "reprs": [repr(PlainLayout()), repr(TensorCoreTiledLayout(inner_k_tiles=4)), repr(SemiSparseLayout())],
        "equal": PlainLayout() == PlainLayout(),
        "base": isinstance(PlainLayout(), Layout),
    }


@snippet("0.12", approx=Y)
def weights_unwrapped_to_parametrizations() -> dict[str, Any]:
    from torchao.quantization import int8_weight_only, quantize_
    from torchao.utils import unwrap_tensor_subclass

    model = mlp()
    quantize_(model, int8_weight_only())
    unwrap_tensor_subclass(model)
    return {"y": model(inputs()), "plain": all(type(p) is nn.Parameter for p in model.parameters())}


@snippet()
def storage_in_bytes() -> dict[str, Any]:
    from torchao.utils import get_model_size_in_bytes

    model = mlp()
    return {"float": get_model_size_in_bytes(model)}
