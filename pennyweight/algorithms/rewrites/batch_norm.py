"""Folds batch normalization into the convolution or linear layer before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import all_reduce
from ...planning.config_resolution import PlanError
from ...planning.scheme import Scheme
from ..base import Rewrite, register
from ..calibration.batches import Batches, read
from .graph import Matrix, trace
from .verify_rewrite import SavedTensors, float_outputs, probe_batch, relative_difference, tolerance

# Times the tolerance of a rewrite: in deep nets float32 rounding adds up. Measured on ResNet-50: 1.3e-5.
DEPTH_FACTOR = 10
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@register("fold")
@dataclass(frozen=True)
class Fold(Rewrite):
    """Folds each batch norm in evaluation mode into the layer whose output it reads (Jacob et al. 2018):

        s = gain / sqrt(running_var + eps);  W -> s W per output channel;  b -> s (b - running_mean) + shift

    The norm is replaced by ``nn.Identity``, and the layer gets a bias if it has none; so the state dict loses the names
    of the norm and may gain a bias. The norm is then part of the weight that is quantized: nothing is left to compute.
    Only norms of the model's own statistics that read nothing but the layer are folded. The outputs are compared.
    """

    def needs_memory(self) -> str:
        return "a model made from config.json has the batch norms again"

    @torch.no_grad()
    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Raises PlanError if there is no batch norm that can be folded."""
        if not self._found(model, self._probe(read(batches))):
            raise PlanError("fold: no batch norm reads the output of a convolution or a linear layer of its own")

    def _probe(self, batches: Batches) -> Any:
        if not batches:
            raise PlanError("fold runs the model to find its batch norms; pass calibration=batches")
        return all_reduce.broadcast_batch(probe_batch(batches[0]))

    def _found(self, model: nn.Module, batch: Any) -> list[tuple[str, nn.Module, Matrix]]:
        """(name of a norm, the norm, the layer before it): each used once in a run."""
        found = trace(model, batch)
        norms = [node for node in found.norms if isinstance(node.what, _NORMS)]
        layers = [node.parents[0].what for node in norms if node.parents[0].kind == "matrix"]
        places: dict[int, int] = {}
        for _, module in model.named_modules(remove_duplicate=False):
            places[id(module)] = places.get(id(module), 0) + 1
        pairs = []
        for node in norms:
            layer = node.parents[0].what if node.parents[0].kind == "matrix" else None
            once = sum(other.what is node.what for other in norms) == 1 and places[id(node.what)] == 1
            if layer is None or not once or sum(other is layer for other in layers) != 1:
                continue
            own = "weight" in layer.module._parameters and layer.param == "weight" and not layer.transposed
            fits = layer.kind in ("convolution", "linear") and layer.plain and own and places[id(layer.module)] == 1
            if fits and node.what.running_mean is not None and layer.height == node.what.num_features:
                pairs.append((node.name, node.what, layer))
        return pairs

    @torch.no_grad()
    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        """See :class:`Rewrite`. Runs the first batch. Raises PlanError, with the model restored, if there is nothing to
        fold or if the outputs change."""
        batch = self._probe(read(batches))
        reference = float_outputs(model, batch, before=True)
        pairs = self._found(model, batch)
        if not pairs:
            raise PlanError("fold: no batch norm reads the output of a convolution or a linear layer of its own")
        kept = SavedTensors(t for _, _, layer in pairs for t in (layer.weight, layer.bias) if t is not None)
        missing = [layer for _, _, layer in pairs if layer.bias is None]
        notes: dict[str, str] = {}
        try:
            for name, norm, layer in pairs:
                _fold(norm, layer)
                _put(model, name, nn.Identity())
                notes[layer.name] = f"{name} folded in" + ("; bias added" if layer in missing else "")
            off = all_reduce.max_number(relative_difference(reference, float_outputs(model, batch)))
            limit = DEPTH_FACTOR * tolerance(model)
            if off > limit:
                raise PlanError(
                    f"fold: the model's outputs changed by {off:.1e} (relative), more than {limit:.1e}; "
                    "something besides its batch norm reads the output of a layer"
                )
        except BaseException:
            for name, norm, _ in pairs:
                _put(model, name, norm)
            kept.restore()
            for layer in missing:
                layer.module._parameters["bias"] = None
            raise
        return notes


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module


def _fold(norm: Any, layer: Matrix) -> None:
    w = layer.weight
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        gain = gain * norm.weight.double()
    bias: Tensor = (
        -norm.running_mean.double() if layer.bias is None else layer.bias.double() - norm.running_mean.double()
    )
    bias = bias * gain if norm.bias is None else bias * gain + norm.bias.double()
    w.data.copy_(w.double() * gain.reshape(-1, *(1,) * (w.ndim - 1)))
    if layer.bias is None:
        made = torch.zeros(layer.height, dtype=w.dtype, device=w.device)
        layer.module._parameters["bias"] = nn.Parameter(made, w.requires_grad)
    assert layer.bias is not None
    layer.bias.data.copy_(bias)
