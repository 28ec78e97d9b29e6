"""Low-precision training on parts of layers: what one device computes, bit for bit or up to what the cut changes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pennyweight as pw
import pennyweight.distributed as pwd
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.training import (
    RECIPES,
    LowPrecisionLinear,
    LowPrecisionTrainingConfig,
    Operand,
    Recipe,
    get_recipe,
    linear,
    to_high_precision_,
)
from pennyweight.training.low_precision.gemm import _GRAD_INPUT, _OUTPUT
from pennyweight.training.low_precision.operands import operand
from tests.distributed.group import MLP, refuses, spawn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

IN, HIDDEN = 128, 256  # shards of whole blocks, those of 128 included
TOKENS = (2, 6)


def sides(how: Recipe) -> list[Any]:
    return [how.output.a, how.output.b, how.grad_input.a, how.grad_input.b, how.grad_weight.a, how.grad_weight.b]


def by_chance(*operands: Any) -> bool:
    return any(isinstance(s, Operand) and s.chance for s in operands)


def of_whole(side: Any) -> bool:
    """Whether a matrix has a scale, or a scale of scales, of which there is one."""
    spec = side.spec if isinstance(side, Operand) else None
    while spec is not None and isinstance(spec.scale, QuantSpec) and spec.block is not None:
        spec = spec.scale
    return spec is not None and spec.scale is not None and spec.block is None


def model(name: str, bias: bool = True, hidden: int = HIDDEN) -> MLP:
    torch.manual_seed(1)
    mlp = MLP(IN, hidden)
    if not bias:
        mlp.up.bias = mlp.down.bias = None
    with torch.no_grad():
        mlp.up.weight[5, 7] = 1.0  # the greatest of all is on one rank
        mlp.down.weight[3, 2] = 1.0
    if name:
        pw.quantize_(mlp, LowPrecisionTrainingConfig(name))
    return mlp


def tokens(width: int, seed: int) -> Tensor:
    x = torch.randn(*TOKENS, width, generator=torch.Generator().manual_seed(seed))
    x[1, 2, 3] = 9.0
    return x


def gradients(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients of the input and of the parameters: what this rank has of them."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    found = [p.grad for p in module.parameters()]
    return tuple(t.to_local() if isinstance(t, DTensor) else t for t in (y.detach(), x.grad, *found))


def value(x: Tensor, side: Any, salt: int, hadamard: int = 0) -> Tensor:
    seen = operand(x, side, 0, salt, hadamard)
    return (seen if isinstance(seen, Tensor) else seen.value()).double()


def sum_over_parts(a: Tensor, b: Tensor, gemm: Any, salts: tuple[int, int], ranks: int, sides: Any = None) -> Tensor:
    """a · bᵀ whose contracted axis is cut: each part quantized by itself, under the scale of the whole where that is one
    of all."""
    pieces = []
    for x, side, salt in zip((a, b), sides or (gemm.a, gemm.b), salts, strict=True):
        if of_whole(side) and not gemm.hadamard:
            pieces.append(value(x, side, salt).chunk(ranks, 1))
        else:
            pieces.append(tuple(value(c, side, salt, gemm.hadamard) for c in x.chunk(ranks, 1)))
    return sum(p @ q.t() for p, q in zip(*pieces, strict=True))  # type: ignore[return-value]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def layers(mesh: DeviceMesh) -> None:
    """Each layer by itself: what is exact and what is a sum over ranks."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, how in RECIPES.items():
        whole = model(name)
        spread = parallelize_module(
            copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        loose = 0.4 if "4" in name else 0.1  # int8_hadamard's name has none

        # by outputs
        x, g = tokens(IN, 2), tokens(HIDDEN, 3) * 1e-3
        y, gx, gw, gb = gradients(whole.up, x, g)
        mine = gradients(spread.up, x, g.chunk(ranks, -1)[rank])
        assert torch.equal(mine[0], y.chunk(ranks, -1)[rank]), name
        assert torch.equal(mine[3], gb.chunk(ranks)[rank]), name
        if by_chance(how.grad_weight.a, how.grad_weight.b):
            assert distance(mine[2], gw.chunk(ranks)[rank]) < loose, name
        else:
            assert torch.equal(mine[2], gw.chunk(ranks)[rank]), name
        rows, flat = x.flatten(0, 1), g.flatten(0, 1)
        gemm = how.grad_input
        if not (by_chance(gemm.a, gemm.b) and of_whole(gemm.a)):
            if gemm.b == "forward":
                want = flat.double() @ value(whole.up.weight.detach(), how.output.b, _OUTPUT[1])
            else:
                want = sum_over_parts(flat, whole.up.weight.detach().t(), gemm, _GRAD_INPUT, ranks)
            assert distance(mine[1].flatten(0, 1), want) < 2e-6, name
        assert distance(mine[1], gx) < loose, name

        # by inputs
        x, g = tokens(HIDDEN, 4), tokens(IN, 5) * 1e-3
        y, gx, gw, gb = gradients(whole.down, x, g)
        mine = gradients(spread.down, x.chunk(ranks, -1)[rank], g)
        rows = x.flatten(0, 1)
        want = sum_over_parts(rows, whole.down.weight.detach(), how.output, _OUTPUT, ranks) + whole.down.bias.detach()
        assert distance(mine[0].flatten(0, 1), want) < 2e-6, name
        assert distance(mine[0], y) < loose, name
        for got, one, gemm in ((mine[1], gx, how.grad_input), (mine[2], gw, how.grad_weight)):
            one = one.chunk(ranks, -1)[rank]
            if gemm.b == "forward" and gemm is how.grad_weight:  # the input as the output saw it: scales of its parts
                seen = value(rows.chunk(ranks, 1)[rank], how.output.a, _OUTPUT[0])
                assert distance(got, g.flatten(0, 1).double().t() @ seen) < 2e-6, name
            elif by_chance(gemm.b) or (by_chance(gemm.a) and of_whole(gemm.b)):
                assert distance(got, one) < loose, name
            else:
                assert torch.equal(got, one), name
        assert torch.equal(mine[3], gb), name


def everything(mlp: nn.Module, *given: Any) -> list[Tensor]:
    """Of an MLP: outputs and all gradients, gathered."""
    x, g = tokens(IN, 2), tokens(IN, 3) * 1e-3
    if given:  # this rank's part of a sequence
        x, g = (t.chunk(given[0], 1)[given[1]] for t in (x, g))
    x = x.clone().requires_grad_()
    mlp.zero_grad()
    y = mlp(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad.full_tensor() for p in mlp.parameters())]


def variants(mesh: DeviceMesh) -> None:
    """Sequence parallel, DTensors between the layers, layers converted when they are cut already: the same bits."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sequence = {
        "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    inside = {
        "up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False),
    }  # fmt: skip
    for name in RECIPES:
        for bias in (True, False):
            base = parallelize_module(model(name, bias), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            want = everything(base)
            later = parallelize_module(model("", bias), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            report = pw.quantize_(later, LowPrecisionTrainingConfig(name))
            assert [r.name for r in report.quantized] == ["up", "down"]
            assert all(map(torch.equal, everything(later), want)), name
            by_token = everything(parallelize_module(model(name, bias), mesh, sequence), ranks, rank)
            for got, one in zip(by_token[:2], want[:2], strict=True):
                assert torch.equal(got, one.chunk(ranks, 1)[rank]), name
            assert all(map(torch.equal, by_token[2:], want[2:])), name
            x, g = tokens(IN, 2).requires_grad_(), tokens(IN, 3) * 1e-3
            spread = parallelize_module(model(name, bias), mesh, inside)
            y = spread(x)
            assert y.placements == (Replicate(),)
            y.backward(distribute_tensor(g, mesh, [Replicate()]))
            found = [y.full_tensor().detach(), x.grad, *(p.grad.full_tensor() for p in spread.parameters())]
            assert all(map(torch.equal, found, want)), name
            assert type(later.up) is LowPrecisionLinear
            to_high_precision_(later)
            assert type(later.up) is nn.Linear


def trains(mesh: DeviceMesh) -> None:
    """A few steps go where one device goes; what was trained is then deployed."""
    for name, off in (("tensorwise", 1e-4), ("mxfp8", 1e-4), ("int8", 2e-2), ("bitnet", 5e-2)):
        whole = model(name)
        spread = parallelize_module(copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for mlp in (whole, spread):
            optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
            for step in range(4):
                (mlp(tokens(IN, step)) - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x = tokens(IN, 9)
            assert distance(spread(x), whole(x)) < off, name
            for config in (pw.Int8WeightOnlyConfig(), get_recipe(name).deployed()):
                stored = copy.deepcopy(spread)
                up = stored.up(x)
                pw.quantize_(stored, config)
                local: Any = stored.up.weight._local_tensor
                assert isinstance(local, QT), name
            # scales of whole tensors and rows: what is deployed by outputs is what was trained
            assert distance(stored.up(x), up) < 1e-4, name


def compiled(mesh: DeviceMesh) -> None:
    """One graph, the bits of eager mode: with scales of whole tensors, nested ones, chance and Hadamard."""
    for name in ("tensorwise", "rowwise", "mxfp4", "nvfp4", "bitnet"):
        spread = parallelize_module(model(name), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        want = everything(spread)
        torch._dynamo.reset()
        got = everything(pwd.compile(spread, backend="aot_eager", fullgraph=True))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)
    torch._dynamo.reset()


def two(mesh: DeviceMesh) -> None:
    layers(mesh)
    variants(mesh)
    trains(mesh)
    compiled(mesh)


def test_two_ranks() -> None:
    spawn(two, 2)
