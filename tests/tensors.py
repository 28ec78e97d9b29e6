"""Quantized tensors that many tests look at: one spec of every kind there is."""

from collections.abc import Sequence

import torch

import pennyweight.kernels  # noqa: F401  (registers the layout torch_int4)
from pennyweight.core.formats import E4M3, INT4, INT8, NF4, TERNARY, UINT3, UINT4, UINT5, UINT8
from pennyweight.core.numerics import to_stored
from pennyweight.core.qparams import Params
from pennyweight.core.spec import MXFP8, NF4_DOUBLE, NVFP4, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT

SPECS = {
    "int8_row": QuantSpec(INT8, (-1,)),
    "int8_tensor": QuantSpec(INT8, None),
    "int8_group": QuantSpec(INT8, (32,), scale=torch.bfloat16),
    "int4_group": QuantSpec(INT4, (32,), scale=torch.bfloat16),
    "int4_bits": QuantSpec(INT4, (32,), scale=torch.bfloat16, layout="bits"),
    "torch_int4": QuantSpec(INT4, (32,), scale=torch.bfloat16, layout="torch_int4"),
    "uint8_asymmetric": QuantSpec(UINT8, (32,), zero_point=True),
    "uint4_asymmetric_bits": QuantSpec(UINT4, (16,), zero_point=True, layout="bits"),
    "tinygemm": TINYGEMM.with_(block=(32,)),
    "ternary_row": QuantSpec(TERNARY, (-1,), layout="bits"),
    "float8_row": QuantSpec(E4M3, (-1,)),
    "float8_square": QuantSpec(E4M3, (16, 16)),
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nf4_double": NF4_DOUBLE,
    "int4_perm": QuantSpec(INT4, (32,), scale=torch.bfloat16, layout="bits"),
    "uint4_perm": QuantSpec(UINT4, (32,), scale=torch.float16, zero_point=True),
    "int8_perm": QuantSpec(INT8, (-1,)),
    "nf4_perm": QuantSpec(NF4, (64,)),
    "int4_zeros_bits": QuantSpec(INT4, (16,), zero_point=INT4, layout="bits"),
    "uint3_zeros_bits": QuantSpec(UINT3, (32,), zero_point=UINT3, layout="bits"),
    "int4_scaled": QuantSpec(INT4, (32,), scale=torch.bfloat16, layout="bits"),
    "int8_scaled": QuantSpec(INT8, (-1,)),
    "nf4_scaled": QuantSpec(NF4, (64,)),
    "uint4_wide_zeros": QuantSpec(UINT4, (16,), zero_point=UINT5),
}
REORDERED = {"int4_perm": torch.int32, "uint4_perm": torch.int64, "int8_perm": torch.int32, "nf4_perm": torch.int64}
SCALED = ("int4_scaled", "int8_scaled", "nf4_scaled")  # with a pre_scale
INT8_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)))
INT8_GROUPS = ActivationSpec(QuantSpec(INT8, (32,)))
INT8_GROUPS_ASYMMETRIC = ActivationSpec(QuantSpec(INT8, (64,), zero_point=True))
UINT8_TOKEN = ActivationSpec(QuantSpec(UINT8, (-1,), zero_point=True))
INT8_STATIC = ActivationSpec(QuantSpec(INT8, None), "static")


def quantized(
    name: str, shape: Sequence[int] = (32, 96), dtype: torch.dtype = torch.float32, act: ActivationSpec | None = None
) -> QT:
    """A normal random tensor under the spec of that name."""
    x = torch.randn(*shape).to(dtype)
    perm = torch.randperm(shape[-1]).to(REORDERED[name]) if name in REORDERED else None
    pre = torch.rand(shape[-1]) + 0.5 if name in SCALED else None
    w = QT.from_float(to_stored(x, perm, pre), SPECS[name], act=act).with_(perm=perm, pre_scale=pre)
    return w.with_(act_scale=torch.tensor([0.03])) if act is not None and act.mode == "static" else w


def again(x: torch.Tensor, like: QT, params: Params | None = None) -> QT:
    """x under the spec of another tensor, its channels in the order and with the ``pre_scale`` that the other has."""
    stored = to_stored(x, like.perm, like.pre_scale)
    return QT.from_float(stored, like.spec, params=params).with_(perm=like.perm, pre_scale=like.pre_scale)


def fits(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape can have that spec."""
    block = SPECS[name].block
    if SPECS[name].layout == "torch_int4":
        return len(shape) == 2 and shape[0] % 16 == 0 and shape[1] >= 32
    return block is None or len(block) <= len(shape)
