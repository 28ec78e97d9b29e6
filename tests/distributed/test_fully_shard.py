"""FSDP2 of quantized and of trainable parameters: the bits of one device, and fewer bytes on the wire."""

import copy
import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import pennyweight as pw
import pennyweight.distributed as pwd
from benchmarks.distributed import Counting
from pennyweight.core.formats import E4M3, INT4
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests.distributed.group import CASES, SOME, build, inputs, mlp, refuses, same_bits, spawn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


class LoRA(nn.Module):
    """A frozen base with a trainable path of rank 4 beside it."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.normal_(self.b.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def trained(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Outputs before each step, and after the last."""
    x, out = inputs(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        y = model(x)
        out.append(y.detach())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*out, model(x).detach()]


def bytes_of(model: Any, x: Tensor) -> int:
    model.set_custom_all_gather(counting := Counting())
    model(x)
    return counting.sent


def frozen(mesh: DeviceMesh, cases: list[str], hidden: int, exact: bool = True) -> None:
    for text in cases:
        base = mlp(text, hidden=hidden)
        whole = LoRA(base, 96)
        model = copy.deepcopy(whole)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        local: Any = model.base.up.weight._local_tensor
        assert isinstance(local, QT), text
        sizes = [len(c) for c in torch.empty(hidden, 1).chunk(mesh.size())] + [0]
        assert local.shape[0] == sizes[mesh.get_local_rank()]
        for mine, alone in zip(trained(model), trained(whole), strict=True):
            if exact:
                assert torch.equal(mine, alone), text
            torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-5)
        assert same_bits(model.base.up.weight.full_tensor().dequantize(), whole.base.up.weight.dequantize()), text


def reloaded(mesh: DeviceMesh) -> None:
    """A state dict copied in between forwards is what the next forward computes with."""
    for text in SOME:
        first, second = mlp(text), mlp(text, seed=1)
        a, b = copy.deepcopy(first), copy.deepcopy(second)
        fully_shard(a, mesh=mesh)
        fully_shard(b, mesh=mesh)
        with torch.no_grad():
            assert torch.equal(a(inputs()), first(inputs()))
            a.load_state_dict(b.state_dict())
            assert torch.equal(a(inputs()), second(inputs())), text


def wire(mesh: DeviceMesh) -> None:
    """Bytes that one rank gives to the all-gather of a forward, beside those of floats."""
    x = inputs(width=512)
    plain = mlp(inputs=512, hidden=512)
    fully_shard(plain, mesh=mesh)
    floats = bytes_of(plain, x)
    assert floats == 2 * (512 * 512 + 512) * 4 // mesh.size()
    for text, most in ((SOME[0], 0.27), (SOME[2], 0.19), ("pw.Float8WeightOnlyConfig()", 0.27)):
        model = mlp(text, inputs=512, hidden=512)
        fully_shard(model, mesh=mesh)
        assert bytes_of(model, x) < most * floats, text
    # trainable parameters
    for spec in (pwd.quantized_all_gather.INT8_128, pw.QuantSpec(E4M3, (128,)), pw.QuantSpec(INT4, (64,))):
        model = mlp(inputs=512, hidden=512)
        fully_shard(model, mesh=mesh)
        gather = pwd.quantized_all_gather_(model, spec)
        y = model(x)
        assert gather.plain == floats
        assert gather.sent <= (0.30 if spec.format is not INT4 else 0.16) * floats
        alone = mlp(inputs=512, hidden=512)
        assert 1e-4 < float((y - alone(x)).norm() / y.norm()) < (0.2 if spec.format is INT4 else 0.05)
        y.square().sum().backward()  # the gradient of the rounded parameters goes to the exact ones
        assert model.up.weight.grad.full_tensor().isfinite().all()
        assert torch.equal(model.up.weight.full_tensor(), alone.up.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = mlp(inputs=512, hidden=512)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    gather = pwd.quantized_all_gather_(model)
    assert model(x).dtype is torch.bfloat16
    assert gather.sent <= 0.55 * gather.plain
    assert gather.plain == floats // 2


def gathered(mesh: DeviceMesh) -> None:
    """What arrives is each rank's buffer, quantized and dequantized, to the bit; NaN and inf arrive as NaN."""
    group, n = mesh.get_group(), 4096 + 77
    every = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(mesh.size())]
    every[1][5], every[1][4100] = torch.nan, torch.inf
    specs = (pwd.quantized_all_gather.INT8_128, pw.QuantSpec(E4M3, (128,)), pw.QuantSpec(INT4, (64,), zero_point=True))
    for spec in specs:
        gather = pwd.QuantizedAllGather(spec)
        out = gather.allocate((n * mesh.size(),), dtype=torch.float32, device=torch.device("cpu"))
        gather(out, every[mesh.get_local_rank()], group)
        for got, x in zip(out.view(mesh.size(), n), every, strict=True):
            plain, block = spec.with_(layout="plain"), spec.block[-1]  # type: ignore[index]
            y = x.masked_fill(~x.isfinite(), torch.nan).view(1, -1)
            expected = dequantize(quantize(y, plain), plain, y.shape)[0]
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
            assert int(got.isnan().sum()) == (
                0 if x.isfinite().all() else block + min(block, n - 4100 // block * block)
            )
    small = torch.arange(8.0)
    out = torch.empty(8 * mesh.size())
    gather = pwd.QuantizedAllGather()
    gather(out, small, group)
    assert torch.equal(out.view(mesh.size(), 8), small.expand(mesh.size(), 8))
    refuses(ValueError, "needs a one-dimensional block", lambda: pwd.QuantizedAllGather(pw.QuantSpec(E4M3, None)))
    refuses(ValueError, "call fully_shard(model) first", lambda: pwd.quantized_all_gather_(mlp()))


APART = [  # what rank 0 has, what rank 1 has
    ("pw.Int8WeightOnlyConfig()", "pw.Float8WeightOnlyConfig()"),
    ("pw.Int4WeightOnlyConfig(group_size=32)", "pw.Int4WeightOnlyConfig(group_size=16)"),
    ("pw.Int8WeightOnlyConfig()", "pw.Int8DynamicActivationInt8WeightConfig()"),
    ("pw.CodebookWeightOnlyConfig(bits=3, dim=1, group_size=32)", "pw.NF4WeightOnlyConfig()"),
]


def apart(mesh: DeviceMesh) -> None:
    """Ranks whose models are quantized otherwise are told so, all of them, and the group goes on to work."""
    rank = mesh.get_local_rank()
    for pair in APART:
        model = mlp(pair[rank])
        fully_shard(model, mesh=mesh)
        with pytest.raises(
            ValueError, match="ranks have different quantized tensors in one exchange: rank 0 has"
        ) as told:
            model(inputs())
        assert "; rank 1 has " in str(told.value)
    model = mlp(SOME[0])
    fully_shard(model, mesh=mesh)
    assert torch.equal(model(inputs()), mlp(SOME[0])(inputs()))
    # one rank not quantized at all: no garbage, and nothing that ends the process
    group = dist.new_group(list(range(mesh.size())), timeout=datetime.timedelta(seconds=4))
    model = mlp(SOME[0] if rank == 0 else "")
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError if rank == 0 else RuntimeError) as error:
        model(inputs())
    assert rank or "after 4 s rank 1 has not sent one. Quantize the same model" in str(error.value)


def two(mesh: DeviceMesh) -> None:
    frozen(mesh, CASES, 50)
    reloaded(mesh)
    wire(mesh)
    gathered(mesh)
    apart(mesh)
    model = mlp()
    fully_shard(model, mesh=mesh)
    refuses(pw.PlanError, "then fully_shard", lambda: pw.quantize_(model, build(SOME[0])))
    by_column = mlp(SOME[0])
    refuses(ValueError, "only axis 0 is supported", lambda: fully_shard(
        by_column, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Shard(0)
    ))  # fmt: skip
    half = mlp(SOME[0])
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    alone = mlp(SOME[0]).to(torch.bfloat16)
    assert torch.equal(half(inputs()), alone(inputs().to(torch.bfloat16)))


def four(mesh: DeviceMesh) -> None:
    frozen(mesh, SOME, 50, exact=False)  # blocks of rows that are cut become finer, and are summed in another order
    frozen(mesh, SOME, 3, exact=False)
    two_axes()


@torch.no_grad()
def two_axes() -> None:
    """Sharded over two ranks, and over the other two copied, or cut by layers."""
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "layers"))
    for text in SOME:
        whole = mlp(text)
        model: Any = copy.deepcopy(whole)
        fully_shard(model, mesh=copies)
        assert torch.equal(model(inputs()), whole(inputs())), text
        model = copy.deepcopy(whole)
        parallelize_module(model, both["layers"], {"up": ColwiseParallel(), "down": pwd.RowwiseParallel()})
        fully_shard(model, mesh=both["shards"])
        torch.testing.assert_close(model(inputs()), whole(inputs()), rtol=1e-5, atol=1e-5)


def one(mesh: DeviceMesh) -> None:
    frozen(mesh, SOME, 50)


def test_two_ranks() -> None:
    spawn(two, 2)


def test_uneven_shards_and_ranks_without_rows() -> None:
    spawn(four, 4)


def test_one_rank() -> None:
    spawn(one, 1)
