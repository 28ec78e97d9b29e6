"""torchao.quantization.GPTQ and GPTQ_MT: quantizers by name, over our solver "gptq"."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ....core.numerics import Parts
from ....core.tensor import AffineQuantizedTensor
from ....planning.configs import AOBaseConfig
from ....quantize.pipeline import quantize_
from ..linear_modules import Int8DynActInt4WeightLinear, Quantizer
from ..v0_8_configs import Int4WeightOnlyConfig, Int8DynamicActivationInt4WeightConfig
from ..v0_8_layouts import Layout, TensorCoreTiledLayout
from .multi_tensor import MultiTensor, batches_of

__all__ = ["GPTQQuantizer", "Int4WeightOnlyGPTQQuantizer", "Int8DynActInt4WeightGPTQQuantizer", "_MultiInput"]


class _MultiInput:
    """One argument of the model in several batches: ``values``."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        self.values = list(inputs)

    def add_input(self, input: Any) -> _MultiInput:
        self.values.append(input)
        return self

    def __getitem__(self, slice: Any) -> _MultiInput:
        return _MultiInput(self.values[slice])


class GPTQQuantizer(Quantizer):
    """Quantizes the linear layers of a model by GPTQ: ``quantize(model, *inputs)``.

    inputs: arguments of the model, each a MultiTensor or ``_MultiInput`` with its values in all calibration batches, or
    one value for all; torchao 0.9's form is one list of them. Layers are calibrated block by block, on the outputs of
    the quantized ones before them.

    A subclass defines ``config()``. Layers whose inputs are not whole groups are padded, or with ``padding_allowed``
    False left alone.
    """

    group_size: int = 64
    percdamp: float = 0.01
    padding_allowed: bool = True

    def config(self) -> AOBaseConfig:
        raise NotImplementedError(f"{type(self).__name__} must define config(), the config of its weights")

    def _picks(self, module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and (self.padding_allowed or module.in_features % self.group_size == 0)

    def quantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, changed in place; its layers stay nn.Linear."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        batches = [_batch(model, *one) for one in batches_of(args, kwargs)]
        solver = {"gptq": {"damping": self.percdamp}}
        quantize_(model, self.config(), self._picks, calibration=batches, algorithm=solver, progress=False)
        return model


def _batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One calibration batch, as pennyweight.quantize_ reads it."""
    if not kwargs:
        return args
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


class Int4WeightOnlyGPTQQuantizer(GPTQQuantizer):
    """int4 weights in groups with tinygemm's real zero points.

    Accepts torchao 0.9's order (blocksize, percdamp, groupsize, ..) too. blocksize, inner_k_tiles, layout and device
    change no number and are ignored.
    """

    def __init__(
        self, group_size: int = 64, blocksize: int = 128, percdamp: float = 0.01, inner_k_tiles: int = 8,
        padding_allowed: bool = True, device: Any = None, layout: Layout | None = None, groupsize: int | None = None,
    ) -> None:  # fmt: skip
        if isinstance(blocksize, float) or 0 < blocksize < 1:
            group_size, blocksize, percdamp = (64 if percdamp == 0.01 else int(percdamp)), group_size, blocksize
        self.group_size = group_size if groupsize is None else groupsize
        self.groupsize, self.blocksize, self.percdamp = self.group_size, blocksize, percdamp
        self.inner_k_tiles, self.padding_allowed = inner_k_tiles, padding_allowed
        self.device = torch.device("cpu" if device is None else device)
        self.layout = TensorCoreTiledLayout(inner_k_tiles) if layout is None else layout

    def config(self) -> AOBaseConfig:
        return Int4WeightOnlyConfig(group_size=self.group_size)


class Int8DynActInt4WeightGPTQQuantizer(GPTQQuantizer):
    """int4 weights in groups with int8 inputs; layers become :class:`Int8DynActInt4WeightLinear`, which ExecuTorch's
    exporter reads: ``weight`` int8, ``scales``, ``zeros``. inner_k_tiles and blocksize are ignored."""

    def __init__(
        self, blocksize: int = 128, percdamp: float = 0.01, groupsize: int = 64, inner_k_tiles: int = 8,
        padding_allowed: bool = True, precision: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.blocksize, self.percdamp, self.groupsize, self.group_size = blocksize, percdamp, groupsize, groupsize
        self.inner_k_tiles, self.padding_allowed, self.precision = inner_k_tiles, padding_allowed, precision

    def config(self) -> AOBaseConfig:
        return Int8DynamicActivationInt4WeightConfig(group_size=self.groupsize)

    def _picks(self, module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and module.in_features % self.groupsize == 0

    @torch.no_grad()
    def quantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, changed in place. Raises ValueError for a layer whose inputs are not whole groups, unless
        ``padding_allowed`` is False, which leaves it alone."""
        for name, layer in model.named_modules():
            if self.padding_allowed and type(layer) is nn.Linear and not self._picks(layer, name):
                raise ValueError(
                    f"{name}: {layer.in_features} inputs are not whole groups of {self.groupsize}; choose a groupsize "
                    "that divides them, or padding_allowed=False, which leaves the layer alone"
                )
        before = {id(m): m.weight for m in model.modules() if type(m) is nn.Linear}
        super().quantize(model, *args, **kwargs)
        for name, layer in list(model.named_modules()):
            w: Any = layer.weight if type(layer) is nn.Linear and id(layer) in before else None
            if not isinstance(w, AffineQuantizedTensor) or before[id(layer)] is w:
                continue
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, self._swapped(layer, w))
        return model

    def _swapped(self, layer: Any, w: AffineQuantizedTensor) -> nn.Module:
        parts: Parts = w.plain_parts()
        new = Int8DynActInt4WeightLinear(
            layer.in_features, layer.out_features, layer.bias is not None, w.device, None, self.groupsize,
            self.precision, self.precision,
        )  # fmt: skip
        zeros: Tensor | None = parts.zero_point
        new.weight.copy_(parts.codes)
        new.scales.copy_(parts.scale)
        if zeros is not None:
            new.zeros.copy_(zeros)
        if layer.bias is not None:
            new.bias.copy_(layer.bias)
        return new


assert MultiTensor  # served by torchao.quantization.GPTQ too
