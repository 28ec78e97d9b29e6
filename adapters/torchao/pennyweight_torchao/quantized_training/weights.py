"""torchao's classes of trainable weights: int8 and ternary products of float weights, and weights stored in them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight.core.numerics import Parts
from pennyweight.core.spec import INT8_ROW, TERNARY_TENSOR, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao.tensor_class import View, plain_codes
from pennyweight.training import Recipe, get_recipe

from .configs import Int8MixedPrecisionTrainingConfig, quantize_int8_rowwise
from .recipe_weight import RecipeWeight

__all__ = [
    "BitNetPacked2bitLinearWeight", "BitNetTrainingLinearWeight", "Int8MixedPrecisionTrainingLinearWeight",
    "Int8QuantizedTrainingLinearWeight",
]  # fmt: skip


class Int8MixedPrecisionTrainingLinearWeight(RecipeWeight):
    """A float weight whose three products are computed in int8 with one scale per row, as ``config`` says."""

    config: Int8MixedPrecisionTrainingConfig
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ("config",)

    def __init__(self, data: Tensor, config: Int8MixedPrecisionTrainingConfig) -> None:
        self.config = config

    def recipe(self) -> Recipe:
        return self.config.make()


class BitNetTrainingLinearWeight(RecipeWeight):
    """A float weight whose product is computed with ternary codes and int8 inputs (BitNet b1.58).

    precomputed_scale: kept, and not used: the scale is computed from the weight.
    """

    _precomputed_scale: Tensor | None

    def __init__(self, data: Tensor, precomputed_scale: Tensor | None = None) -> None:
        self._precomputed_scale = precomputed_scale

    def recipe(self) -> Recipe:
        return get_recipe("bitnet")


class Int8QuantizedTrainingLinearWeight(View):
    """A trainable weight stored in int8 with one scale per row. torchao rounds every write to it stochastically; here
    the optimizers of ``torchao.optim`` do, others within ``pennyweight.training.stochastic_rounding(step)``."""

    tensor_data_names = ["int_data", "scale"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        return w.spec.with_(scale=torch.float32, layout="plain") == INT8_ROW and w.act is None

    @classmethod
    def build(cls, int_data: Tensor, scale: Tensor) -> QT:
        """x = int_data * scale. int_data: int8 [N, K]; scale: [N], whose dtype is that of the weight."""
        assert int_data.dtype is torch.int8, f"int_data must be int8, got {int_data.dtype}"
        assert (int_data.ndim, scale.shape) == (2, int_data.shape[:1]), (
            f"int_data must be [rows, columns] and scale [rows], got {list(int_data.shape)} and {list(scale.shape)}"
        )
        return QT(Parts(int_data, scale.view(-1, 1)), _rows(scale.dtype), tuple(int_data.shape), scale.dtype)

    @classmethod
    def from_float(cls, tensor: Tensor) -> QT:
        """``tensor`` rounded to nearest with scale = absmax / 127; needs a gradient if it does."""
        made = cls.build(*quantize_int8_rowwise(tensor.detach()))
        return made.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        assert w.scale is not None
        return {"int_data": plain_codes(w), "scale": w.scale.reshape(-1)}


def _rows(dtype: torch.dtype) -> QuantSpec:
    return INT8_ROW.with_(scale=dtype)


class BitNetPacked2bitLinearWeight(View):
    """A ternary weight with four codes per byte and one scale; inputs are int8 per token."""

    tensor_data_names = ["int_data", "scale"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        return w.spec.format is TERNARY_TENSOR.format and w.spec.block is None and w.ndim == 2

    @classmethod
    def build(cls, int_data: Tensor, scale: Tensor) -> QT:
        """x = codes * scale. int_data: int8 [N, K / 4], the first code in the upper bits; scale: one number."""
        assert int_data.dtype is torch.int8, f"int_data must be int8, got {int_data.dtype}"
        assert scale.shape == (), f"scale must be one number, got {list(scale.shape)}"
        codes = _unpack_i2_in_i8(int_data)
        spec = TERNARY_TENSOR.with_(scale=scale.dtype)
        act = ActivationSpec(INT8_ROW, "dynamic", "absmax")
        return QT(Parts(codes, scale.view(1, 1)), spec, tuple(codes.shape), scale.dtype, act)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        assert w.scale is not None
        return {"int_data": _pack_i2_in_i8(plain_codes(w)), "scale": w.scale.reshape(())}


def _pack_i2_in_i8(x: Tensor) -> Tensor:
    """Four codes of two bits per byte of a matrix, the first one in the upper bits."""
    a, b, c, d = ((x[:, i::4] & 3) for i in range(4))
    return a << 6 | b << 4 | c << 2 | d


def _unpack_i2_in_i8(x: Tensor) -> Tensor:
    """Inverse of :func:`_pack_i2_in_i8`: shifts of signed bytes extend the sign."""
    return torch.stack([x << up >> 6 for up in (0, 2, 4, 6)], -1).flatten(1)


QT.int_data = property(plain_codes, doc="The codes, one per element, of a trainable int8 weight.")  # type: ignore[attr-defined]
torch.serialization.add_safe_globals(
    [Int8MixedPrecisionTrainingLinearWeight, BitNetTrainingLinearWeight, Int8MixedPrecisionTrainingConfig]
)
