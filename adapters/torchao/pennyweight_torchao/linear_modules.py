"""torchao's quantizers by module swap: finding linear layers, layers with plain buffers, and the quantizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.torchao.int4 import packed_by_aten
from pennyweight.io.codecs.torchao.tensor_class import int_codes, ready
from pennyweight.planning.configs.integer import INT8_EPS
from pennyweight.planning.granularity import MappingType

from .exported_ops import fake_quantized_tokens, int4_values, is_exported
from .groupwise import group_quantize_tensor_symmetric, groupwise_affine_quantize_tensor
from .operators.affine import define

__all__ = [
    "Int4WeightOnlyQuantizer", "Int8DynActInt4WeightLinear", "Int8DynActInt4WeightQuantizer", "Quantizer",
    "TwoStepQuantizer", "WeightOnlyInt4Linear", "_check_linear_int4_k", "_is_linear", "_replace_linear_8da4w",
    "_replace_linear_int4", "_replace_with_custom_fn_if_matches_filter",
]  # fmt: skip
_PER_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True), "dynamic", None, INT8_EPS)


Filter = Callable[[nn.Module, str], bool]


def _is_linear(mod: nn.Module, *args: Any) -> bool:
    """The default filter: nn.Linear whose weight is not quantized, without nn.MultiheadAttention's output layer."""
    plain = isinstance(mod, nn.Linear) and not isinstance(mod, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return plain and hasattr(mod, "weight") and not isinstance(mod.weight, AffineQuantizedTensor)


def _replace_with_custom_fn_if_matches_filter(
    model: nn.Module, replacement_fn: Callable[..., nn.Module], filter_fn: Filter, cur_fqn: str = "",
    device: torch.device | str | None = None, extra_args: tuple[Any, ...] = (),
) -> nn.Module:  # fmt: skip
    """The model with ``replacement_fn(module, *extra_args)`` in place of each module that the filter matches, names
    prefixed by ``cur_fqn``; does not descend into replaced modules."""
    if filter_fn(model, cur_fqn.removesuffix(".")):
        return replacement_fn(model if device is None else model.to(device), *extra_args)
    for name, child in list(model.named_children()):
        new = _replace_with_custom_fn_if_matches_filter(
            child, replacement_fn, filter_fn, f"{cur_fqn}{name}.", device, extra_args
        )
        if new is not child:
            setattr(model, name, new)
    return model if device is None else model.to(device)


class Quantizer:
    """Quantizes a model."""

    def quantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        raise NotImplementedError


class TwoStepQuantizer:
    """Prepares a model for training, and converts it afterwards."""

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        raise NotImplementedError

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        raise NotImplementedError


def _check_linear_int4_k(k: int, groupsize: int = 1, inner_k_tiles: int | None = None) -> bool:
    """Whether torchao supports this K unchanged: whole groups, and whole tiles of 16 rows if there are tiles."""
    return k % groupsize == 0 and (inner_k_tiles is None or k % (inner_k_tiles * 16) == 0)


class _Buffers(nn.Module):
    """A linear layer whose weight is built from its buffers, and rebuilt when one of them changes."""

    _made: tuple[Any, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        define()

    def _make(self) -> Tensor:
        raise NotImplementedError

    def _weight(self) -> Tensor:
        now = tuple((id(b), b._version) for b in self.buffers(recurse=False))
        if self._made is None or self._made[0] != now:
            self._made = now, self._make()
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        define()


class Int8DynActInt4WeightLinear(_Buffers):
    """int4 codes [out, in] in int8, scales and zeros [out, in / groupsize], with int8 activations per token.

    The buffers are torchao's, so its state dicts load; the weight packed for the kernel is stored in addition.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None,
        groupsize: int = 256, precision: torch.dtype = torch.float32, scales_precision: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if dtype is not None:
            raise ValueError("Please specify 'precision' instead of 'dtype'")
        assert in_features % groupsize == 0, f"require in_features:{in_features} % groupsize:{groupsize} == 0"
        self.in_features, self.out_features = in_features, out_features
        self.groupsize, self.precision = groupsize, precision
        groups = (out_features, in_features // groupsize)
        self.register_buffer("weight", torch.zeros((out_features, in_features), dtype=torch.int8, device=device))
        self.register_buffer("scales", torch.zeros(groups, dtype=scales_precision, device=device))
        self.register_buffer("zeros", torch.zeros(groups, dtype=scales_precision, device=device))
        self.bias: Tensor | None
        if bias:
            self.register_buffer("bias", torch.zeros(out_features, dtype=precision, device=device))
        else:
            self.bias = None

    def _make(self) -> Tensor:
        block = (1, self.groupsize)
        return ready(
            int_codes(self.weight, self.scales, self.zeros, block, self.precision, -8, 7, act=_PER_TOKEN)
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """input [.., in] -> [.., out] in ``precision``; an exported graph has torchao's ops instead of the kernel."""
        if is_exported(self.weight):
            x = fake_quantized_tokens(input.to(self.precision))
            w = int4_values(self.weight, self.scales, self.zeros, self.groupsize, self.precision)
            return F.linear(x, w, self.bias)
        return F.linear(input.to(self.precision), self._weight(), self.bias)


class Int8DynActInt4WeightQuantizer(Quantizer):
    """Replaces each linear layer whose inputs are whole groups by :class:`Int8DynActInt4WeightLinear`."""

    def __init__(
        self, groupsize: int = 256, padding_allowed: bool = False, precision: torch.dtype = torch.float32,
        scales_precision: torch.dtype = torch.float32, device: Any = torch.device("cpu"),  # noqa: B008
        mapping_type: MappingType = MappingType.SYMMETRIC,
    ) -> None:  # fmt: skip
        self.groupsize, self.padding_allowed, self.precision = groupsize, padding_allowed, precision
        self.scales_precision, self.device, self.mapping_type = scales_precision, device, mapping_type

    @torch.no_grad()
    def quantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, changed in place."""

        def swap(old: Any) -> nn.Module:
            assert old.in_features % self.groupsize == 0, (
                f"require in_features:{old.in_features} % self.groupsize:{self.groupsize} == 0"
            )
            new = Int8DynActInt4WeightLinear(
                old.in_features, old.out_features, old.bias is not None, self.device, groupsize=self.groupsize,
                precision=self.precision, scales_precision=self.scales_precision,
            )  # fmt: skip
            codes, scales, zeros = group_quantize_tensor_symmetric(
                old.weight.to(self.precision), 4, self.groupsize, self.scales_precision, mapping_type=self.mapping_type
            )
            for name, value in (("weight", codes), ("scales", scales), ("zeros", zeros), ("bias", old.bias)):
                if value is not None:
                    getattr(new, name).copy_(value)
            return new

        return _swap_linear(model, swap)


class WeightOnlyInt4Linear(_Buffers):
    """int4 weights as torch's CPU kernel packs them [out, in / 2], scales_and_zeros [in / groupsize, out, 2]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None, dtype: Any = None,
        groupsize: int = 128, inner_k_tiles: int = 8, precision: torch.dtype = torch.bfloat16,
        scales_precision: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias, "require bias=False"
        if dtype is not None:
            raise ValueError("Please specify 'precision' instead of 'dtype'")
        if torch.device(device or "cpu").type not in ("cpu", "meta"):
            raise NotImplementedError(f"WeightOnlyInt4Linear on {device}: CPU only; use Int4WeightOnlyConfig()")
        self.origin_in_features = in_features
        self.padding = not _check_linear_int4_k(in_features, groupsize, inner_k_tiles)
        in_features = -(-in_features // 1024) * 1024 if self.padding else in_features
        assert out_features % 8 == 0, "require out_features % 8 == 0"
        self.in_features, self.out_features, self.groupsize = in_features, out_features, groupsize
        self.inner_k_tiles, self.precision, self.scales_precision = inner_k_tiles, precision, scales_precision
        self.register_buffer("weight", torch.zeros((out_features, in_features // 2), dtype=torch.uint8, device=device))
        shape = (in_features // groupsize, out_features, 2)
        self.register_buffer("scales_and_zeros", torch.zeros(shape, dtype=scales_precision, device=device))

    def _make(self) -> Tensor:
        shape = (self.out_features, self.in_features)
        return ready(packed_by_aten(self.weight, self.scales_and_zeros, (1, self.groupsize), shape, self.precision))

    def forward(self, input: Tensor) -> Tensor:
        """input [.., in] -> [.., out]."""
        if self.padding:
            input = F.pad(input, (0, self.in_features - self.origin_in_features))
        if is_exported(self.weight):
            x = input.to(self.precision).reshape(-1, self.in_features)
            both = self.scales_and_zeros.to(self.scales_precision)
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, self.groupsize, both)
            return y.reshape(*input.shape[:-1], self.out_features).to(input.dtype)
        return F.linear(input.to(self.precision), self._weight()).to(input.dtype)


class Int4WeightOnlyQuantizer(Quantizer):
    """Replaces each linear layer without bias by :class:`WeightOnlyInt4Linear`. ``device`` defaults to the CPU."""

    def __init__(
        self, groupsize: int = 256, padding_allowed: bool = True, inner_k_tiles: int | None = 8,
        device: Any = torch.device("cpu"), precision: torch.dtype = torch.bfloat16,  # noqa: B008
    ) -> None:  # fmt: skip
        assert inner_k_tiles in (2, 4, 8), f"inner_k_tiles must be 2, 4 or 8, got {inner_k_tiles}"
        assert groupsize in (32, 64, 128, 256), f"groupsize must be 32, 64, 128 or 256, got {groupsize}"
        self.groupsize, self.padding_allowed, self.inner_k_tiles = groupsize, padding_allowed, inner_k_tiles
        self.device, self.precision = device, precision

    @torch.no_grad()
    def quantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, changed in place. Layers that do not fit are padded, or skipped with a warning."""

        def swap(old: Any) -> nn.Module:
            if old.bias is not None:
                return old
            fits = _check_linear_int4_k(old.in_features, self.groupsize, self.inner_k_tiles)
            if not fits and not self.padding_allowed:
                warnings.warn(
                    f"a layer of {old.in_features} inputs is not quantized: not whole groups of {self.groupsize} "
                    f"in tiles of {self.inner_k_tiles} times 16; padding_allowed=True pads them",
                    stacklevel=2,
                )
                return old
            new = WeightOnlyInt4Linear(
                old.in_features, old.out_features, False, self.device, None, self.groupsize, self.inner_k_tiles or 8,
                self.precision, self.precision,
            )  # fmt: skip
            weight = F.pad(old.weight, (0, new.in_features - old.in_features)).cpu()
            codes, both = groupwise_affine_quantize_tensor(weight, 4, self.groupsize, self.precision)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), self.inner_k_tiles)
            new.weight.copy_(packed)
            new.scales_and_zeros.copy_(both)
            return new

        return _swap_linear(model, swap)


def _swap_linear(model: nn.Module, swap: Any) -> nn.Module:
    return _replace_with_custom_fn_if_matches_filter(model, swap, lambda m, fqn: type(m) is nn.Linear)


def _replace_linear_8da4w(
    module: nn.Module, groupsize: int, padding_allowed: bool, precision: torch.dtype, scales_precision: torch.dtype,
    linear_class: type[nn.Module], copy_weights: bool = False,
) -> None:  # fmt: skip
    """Replace the linear layers in ``module`` by layers of ``linear_class``, those whose inputs are whole groups.

    nn.MultiheadAttention's output layer is left alone: attention reads its weight and does not call it.

    padding_allowed  replace the others too; a class that does not pad raises for them
    copy_weights     whether the new layers take the parameters of the old ones; never on the meta device
    """

    def fits(child: Any, fqn: str) -> bool:
        return _is_linear(child) and (
            padding_allowed or _check_linear_int4_k(child.in_features, groupsize)
        )  # fmt: skip

    def swap(old: Any) -> nn.Module:
        new: Any = linear_class(
            old.in_features, old.out_features, bias=old.bias is not None, device=old.weight.device,
            groupsize=groupsize, precision=precision, scales_precision=scales_precision,
        )  # fmt: skip
        if copy_weights and not old.weight.is_meta:
            new.weight, new.bias = old.weight, old.bias
        return new.train(old.training)

    _replace_with_custom_fn_if_matches_filter(module, swap, fits)


def _replace_linear_int4(
    module: nn.Module, groupsize: int, inner_k_tiles: int | None, padding_allowed: bool,
    skip_layer_func: Callable[[Tensor], bool] | None = None, precision: torch.dtype = torch.bfloat16,
    scales_precision: torch.dtype = torch.bfloat16, linear_class: type[nn.Module] = WeightOnlyInt4Linear,
    copy_weights: bool = False,
) -> None:  # fmt: skip
    """As :func:`_replace_linear_8da4w`, for layers without bias of whole groups and whole tiles of 16 x inner_k_tiles.

    skip_layer_func  weight -> whether to leave its layer alone
    """

    def fits(child: Any, fqn: str) -> bool:
        return (
            _is_linear(child)
            and child.bias is None
            and not (skip_layer_func is not None and skip_layer_func(child.weight))
            and (padding_allowed or _check_linear_int4_k(child.in_features, groupsize, inner_k_tiles))
        )

    def swap(old: Any) -> nn.Module:
        new: Any = linear_class(
            old.in_features, old.out_features, bias=False, device=old.weight.device, groupsize=groupsize,
            inner_k_tiles=inner_k_tiles, precision=precision, scales_precision=scales_precision,
        )  # fmt: skip
        if copy_weights and not old.weight.is_meta:
            new.weight = old.weight
        return new.train(old.training)

    _replace_with_custom_fn_if_matches_filter(module, swap, fits)
