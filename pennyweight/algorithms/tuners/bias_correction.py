"""Bias correction: compensates for the mean output error of each layer in its bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor
from ...distributed import all_reduce
from ...planning.parameters import kind_of
from ...planning.run_batch import token_mask
from ..base import Tuner, register
from ..calibration.batches import read
from ..calibration.block_order import inference_mode
from ..calibration.float32_products import run_batch


@register("bias")
@dataclass(frozen=True)
class Bias(Tuner):
    """Adds the mean error of a quantized layer's output to its bias (Nagel et al. 2019, Finkelstein et al. 2019).

        b += E[(W - Wq) x]

    x are the layer's inputs in the quantized model; if the layer quantizes its inputs, the error includes that. Layers
    are corrected in the model's call order, ``at_once`` layers per run over the data: within a run a layer does not see
    the effect of the other new biases on its input.

    create      add a bias to linear layers that have none; their state dict then has one more name
    """

    create: bool = False
    at_once: int = 16

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"bias: at_once must be at least 1, got {self.at_once}")

    def needs_memory(self) -> str:
        return "create adds biases, which a model made from config.json lacks" if self.create else ""

    @torch.no_grad()
    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        """See :class:`Tuner`. Layers that the data does not reach are not changed."""
        batches, notes = read(batches), {}
        exact = dict(teacher.named_modules())
        layers: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            w = module._parameters.get("weight")
            kind = kind_of(module)
            if not isinstance(w, AffineQuantizedTensor) or kind is None or kind.op not in ("linear", "convolution"):
                continue
            key = f"{name}.weight" if name else "weight"
            if module._parameters.get("bias") is not None:
                layers[name] = module
            elif not self.create:
                notes[key] = "no bias to correct"
            elif kind.transposed:
                notes[key] = f"no bias to correct, and none created: {type(module).__name__} does not support one"
            else:
                layers[name] = module
        order = _called(model, layers, batches)
        for name in layers:
            if name not in order:
                notes[f"{name}.weight"] = "bias not corrected: no calibration data"
        for start in range(0, len(order), self.at_once):
            part = {name: layers[name] for name in order[start : start + self.at_once]}
            for name, mean in mean_errors(model, part, exact, batches).items():
                module = part[name]
                if not bool(mean.isfinite().all()):
                    notes[f"{name}.weight"] = "bias not corrected: its error is not finite"
                    continue
                bias = module._parameters.get("bias")
                made = bias is None
                if bias is None:
                    weight = module._parameters["weight"]
                    assert weight is not None
                    bias = nn.Parameter(torch.zeros(mean.shape, dtype=weight.dtype, device=weight.device), False)
                    module._parameters["bias"] = bias
                bias.data.copy_(bias.data.double() + mean)
                notes[f"{name}.weight"] = "bias created and corrected" if made else "bias corrected"
        return notes


def mean_errors(
    model: nn.Module, layers: dict[str, nn.Module], exact: dict[str, nn.Module], batches: Sequence[Any]
) -> dict[str, Tensor]:
    """float64 [outputs] for each called layer: the mean over tokens of the float layer's output minus the quantized
    layer's, both on the quantized layer's inputs. Tokens whose attention_mask is 0 do not count."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: Tensor | None = None

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            kind = kind_of(module)
            off = exact[name](*args).double() - output.double()
            if kind is not None and kind.op == "convolution":
                rank = module.weight.ndim - 1  # type: ignore[operator]
                off = off.movedim(-rank, -1)
            elif mask is not None and off.ndim > 2 and off.shape[:2] == mask.shape:
                off = off[mask.to(off.device)]
            off = off.reshape(-1, off.shape[-1])
            sums[name] = sums.get(name, 0) + off.sum(0)
            counts[name] = counts.get(name, 0) + off.shape[0]

        return after

    with ExitStack() as hooks, inference_mode(model):
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_hook(hook(name)))
        for batch in batches:
            mask = token_mask(batch)
            run_batch(model, batch)
    means = {}
    for name, module in layers.items():
        device = next(module.parameters()).device
        known = all_reduce.max_shape(sums[name].shape[0] if name in sums else 0)
        total = all_reduce.reduce_sum(
            sums[name] if name in sums else torch.zeros(known, dtype=torch.float64, device=device)
        )
        count = all_reduce.reduce_sum(torch.tensor(float(counts.get(name, 0)), device=device, dtype=torch.float32))
        if count > 0:
            means[name] = total / float(count)
    return means


def _called(model: nn.Module, layers: dict[str, nn.Module], batches: Sequence[Any]) -> list[str]:
    """Names of layers in the order in which the batches first reach them."""
    order: dict[str, None] = {}

    def before(name: str) -> Callable[..., None]:
        return lambda module, args: order.setdefault(name)

    with ExitStack() as hooks, inference_mode(model):
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_pre_hook(before(name)))
        for batch in batches:
            run_batch(model, batch)
            if len(order) == len(layers):
                break
    return all_reduce.union_names(list(layers), list(order))
