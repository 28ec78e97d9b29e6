# ruff: noqa: PT009 (a unittest case, for those who run it without pytest)
"""The conformance case for tensor parallelism: needs torch.distributed, and starts processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.testing._internal import common_utils
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

from ...core.numerics import sqnr
from ...core.tensor import AffineQuantizedTensor
from ...planning.configs import Int8WeightOnlyConfig
from ...quantize import quantize_

__all__ = ["TorchAOTensorParallelTestCase"]


class _OneLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class TorchAOTensorParallelTestCase(DTensorTestBase):
    """A layer sharded by rows of its weight, then one sharded by columns: eager and compiled, against the whole ones.

    Two processes, on GPUs over nccl where there are two, else on the CPU over gloo.
    """

    COMMON_DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # noqa: RUF012 (subclasses replace it)
    TENSOR_SUBCLASS: Any = AffineQuantizedTensor
    QUANT_METHOD_FN: Any = staticmethod(Int8WeightOnlyConfig)
    QUANT_METHOD_KWARGS: Any = {}  # noqa: RUF012
    MIN_SQNR: float = 30  # dB of the sharded layers against the whole ones

    @property
    def world_size(self) -> int:
        return 2

    @property
    def device_type(self) -> str:
        return "cuda" if torch.cuda.device_count() >= self.world_size else "cpu"

    @staticmethod
    def colwise_shard(m: Any, mesh: DeviceMesh) -> nn.Module:
        """Each process keeps its rows of the weight [N, K]: columns of its transpose."""
        return _sharded(m, mesh, 0)

    @staticmethod
    def rowwise_shard(m: Any, mesh: DeviceMesh) -> nn.Module:
        """Each process keeps its columns of the weight [N, K]."""
        return _sharded(m, mesh, 1)

    def quantize(self, m: nn.Module) -> nn.Module:
        quantize_(m, self.QUANT_METHOD_FN(**self.QUANT_METHOD_KWARGS))
        return m

    @common_utils.parametrize("dtype", COMMON_DTYPES)
    @with_comms
    def test_tp(self, dtype: torch.dtype) -> None:
        torch.manual_seed(5)  # every process makes the same layers
        device = torch.device(self.device_type, self.rank) if self.device_type == "cuda" else torch.device("cpu")
        up, down = _OneLinear(256, 512).to(device, dtype), _OneLinear(512, 256).to(device, dtype)
        x = torch.randn(32, 256, device=device, dtype=dtype)
        up, down = self.quantize(up), self.quantize(down)
        # torch 2.13 names the cached graph of a DTensor by its outside alone, so another class would get this one's.
        with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
            want_up = up(x)
            want = down(want_up)
            mesh = self.build_device_mesh()
            up, down = self.colwise_shard(up, mesh), self.rowwise_shard(down, mesh)
            self.assertIsInstance(up.linear.weight.to_local(), self.TENSOR_SUBCLASS)
            whole = DTensor.from_local(x, mesh, [Replicate()])
            for run_up, run_down in ((up, down), (torch.compile(up), torch.compile(down))):
                got_up = run_up(whole)
                self.assertGreater(sqnr(want_up, got_up.full_tensor()), self.MIN_SQNR)
                self.assertGreater(sqnr(want, run_down(got_up).full_tensor()), self.MIN_SQNR)


def _sharded(m: Any, mesh: DeviceMesh, axis: int) -> nn.Module:
    weight = m.linear.weight
    n = weight.size(axis) // mesh.size()
    local = weight.narrow(axis, mesh.get_local_rank() * n, n)
    m.linear.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(axis)]), requires_grad=False)
    return m


common_utils.instantiate_parametrized_tests(TorchAOTensorParallelTestCase)
