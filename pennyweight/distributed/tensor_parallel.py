"""Row-wise tensor parallelism with activation scales of complete rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from ..core.distributed.full_tensor import all_reduce, local_tensor
from ..core.numerics import dequantize, quantize
from ..core.qparams import BY_RANGE, choose, default_rule
from ..core.spec import ActivationSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import prepare

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
        if act is None or act.mode != "dynamic" or (act.spec.block or (-1,)) != (-1,):
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


def over_ranks(x: Tensor, act: ActivationSpec, mesh: DeviceMesh) -> Tensor:
    """Fake-quantize x [.., part of K] with the qparams of complete rows under ``act``; straight-through gradient."""
    given = x.detach()
    ends = torch.stack([-given.amin(-1), given.amax(-1)], -1)
    if act.spec.block is None:
        ends = ends.reshape(-1, 2).amax(0).expand(*x.shape[:-1], 2)
    ends = all_reduce(ends, "max", (mesh.get_group(0).group_name,))
    ends = torch.stack([-ends[..., 0], ends[..., 1]], -1)
    spec = act.spec
    params = choose(ends.to(x.dtype), spec, act.rule, act.eps)
    seen = dequantize(quantize(given, spec, act.rule, act.eps, params), spec, x.shape, x.dtype)
    return x + (seen - given).detach() if x.requires_grad else seen
