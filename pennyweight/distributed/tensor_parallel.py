"""Tensor parallelism: row-wise layers with activation scales of complete rows, and torch.compile of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from ..core.numerics import dequantize, quantize
from ..core.qparams import BY_RANGE, choose, default_rule
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import prepare
from .all_reduce import reduce_over_groups
from .dtensor import local_tensor

ACT = "_input_over_ranks"  # module attribute: activation spec of the unsharded input


class RowwiseParallel(TorchRowwise):
    """torch's RowwiseParallel with one scale per token over all ranks for dynamically quantized inputs.

    With torch's own class each rank uses the scale of its part of a token: slightly finer, but not equal to a single
    device. Here ranks exchange the minimum and maximum of each token (8 bytes), quantize the input with these, and
    multiply by the weight as weight-only. Layers without dynamic activations, or with input groups within a rank, use
    torch's implementation.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        super()._partition_linear_fn(name, module, device_mesh)
        local: Any = local_tensor(module.weight)
        act = local.act if isinstance(local, AffineQuantizedTensor) else None
        if act is None or act.mode != "dynamic":
            return
        above = act.spec.scale
        if isinstance(above, QuantSpec) and above.scale is not None:
            raise ValueError(
                f"{name}: the scales of input {act} are quantized under a scale of the whole input, which ranks do not "
                "exchange; use a calibrated scale, or RowwiseParallel of torch, which quantizes each part separately"
            )
        if (act.spec.block or (-1,)) != (-1,):
            weight: Any = module.weight
            width = int(weight.shape[-1])
            _require_whole_groups(name, act, -(-width // device_mesh.size()))
            return
        if (act.rule or default_rule(act.spec)) not in BY_RANGE or not isinstance(act.spec.scale, torch.dtype):
            raise ValueError(
                f"{name}: the qparams of input {act} do not depend on minimum and maximum alone, which is all that "
                "ranks exchange; use torch's RowwiseParallel, which quantizes each rank's part separately"
            )
        local.data = prepare(local.with_(act=None))
        setattr(module, ACT, act)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x = TorchRowwise._prepare_input_fn(input_layouts, desired, mod, inputs, device_mesh)
        act = getattr(mod, ACT, None)
        if act is None:
            return x
        seen = over_ranks(x.to_local(), act, device_mesh)
        return DTensor.from_local(seen, device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _require_whole_groups(name: str, act: ActivationSpec, columns: int) -> None:
    """Raise ValueError if the columns of one rank cut through a group of input columns: it would get two scales."""
    group = act.spec.block[-1] if act.spec.block is not None else -1
    if group > 0 and columns % group:
        raise ValueError(
            f"{name}: a rank has {columns} columns of its input, which cut through the groups of {group} that share a "
            "scale; use a group size that divides them, or torch's RowwiseParallel, which quantizes each rank's part "
            "separately"
        )


def over_ranks(x: Tensor, act: ActivationSpec, mesh: DeviceMesh) -> Tensor:
    """Fake-quantize x [.., part of K] with the qparams of complete rows under ``act``; straight-through gradient."""
    given = x.detach()
    ends = torch.stack([-given.amin(-1), given.amax(-1)], -1)
    if act.spec.block is None:
        ends = ends.reshape(-1, 2).amax(0).expand(*x.shape[:-1], 2)
    ends = reduce_over_groups(ends, "max", (mesh.get_group(0).group_name,))
    ends = torch.stack([-ends[..., 0], ends[..., 1]], -1)
    spec = act.spec
    params = choose(ends.to(x.dtype), spec, act.rule, act.eps)
    seen = dequantize(quantize(given, spec, act.rule, act.eps, params), spec, x.shape, x.dtype)
    return x + (seen - given).detach() if x.requires_grad else seen


def compile(model: nn.Module | Callable[..., Any], *, backend: Any = "inductor", **options: Any) -> Any:
    """torch.compile, for weights that are DTensors of quantized tensors: without the cache of traced graphs that
    persists between processes.

    torch 2.13 keys a graph by mesh, placement, shape and dtype of a DTensor, but not by its inner tensor. Two schemes
    on weights of the same shape would share a graph, and the second model would compute with the scheme of the first;
    ranks with local tensors of different sizes would share one and read out of bounds. The cache is disabled only while
    this model is traced; generated code is still reused. options: those of torch.compile.
    """
    mode, settings = options.pop("mode", None), options.pop("options", None)
    if backend == "inductor":
        inner: Any = torch._TorchCompileInductorWrapper(
            mode if mode or settings else "default", settings, options.get("dynamic")
        )
    elif isinstance(backend, str):
        inner = torch._dynamo.lookup_backend(backend)
    else:
        inner = backend

    def without_cache(graph: Any, inputs: Any, **more: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return inner(graph, inputs, **more)

    return torch.compile(model, backend=without_cache, **options)
