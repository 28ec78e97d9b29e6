"""Low-precision training on parts of layers: what one device computes, bit for bit or up to what the cut changes."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import pennyweight as pw
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.distributed.dtensor import full_tensor as gathered
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
from pennyweight.training.low_precision.linear import _GRAD_INPUT, _OUTPUT
from pennyweight.training.low_precision.quantize_operand import quantize_operand
from tests.distributed.group import MLP, refuses, spawn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

IN, HIDDEN = 128, 256  # shards of whole blocks, those of 128 included
TOKENS = (2, 6)
# Outputs, and gradients of inputs, that are one device's up to the order of sums: whole blocks, and whole tensors.
SUMS = (
    ("tensorwise", "blockwise", "mxfp8", "mxfp8_with_gw_hp", "mxfp8_mxfp4", "mxfp4", "nvfp4"),
    ("tensorwise", "blockwise", "mxfp8", "mxfp8_with_gw_hp", "bitnet"),
)


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


def model(name: str | Recipe, bias: bool = True, hidden: int = HIDDEN) -> MLP:
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
    seen = quantize_operand(x, side, 0, salt, hadamard)
    return (seen if isinstance(seen, Tensor) else seen.value()).double()


def sum_over_parts(a: Tensor, b: Tensor, gemm: Any, salts: tuple[int, int], ranks: int) -> Tensor:
    """a · bᵀ whose contracted axis is cut: each part quantized by itself, or under the scale of the whole matrix."""
    pieces = []
    for x, side, salt in zip((a, b), (gemm.a, gemm.b), salts, strict=True):
        if of_whole(side) and not gemm.hadamard:
            pieces.append(value(x, side, salt).chunk(ranks, 1))
        else:
            pieces.append(tuple(value(c, side, salt, gemm.hadamard) for c in x.chunk(ranks, 1)))
    return sum(p @ q.t() for p, q in zip(*pieces, strict=True))  # type: ignore[return-value]


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def layers(mesh: DeviceMesh) -> None:
    """Each layer by itself: what is exact and what is a sum over ranks."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, how in RECIPES.items():
        whole = model(name)
        spread = parallelize_module(copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
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
        flat, gemm = g.flatten(0, 1), how.grad_input
        if not (by_chance(gemm.a, gemm.b) and of_whole(gemm.a)):
            if gemm.b == "forward":
                want = flat.double() @ value(whole.up.weight.detach(), how.output.b, _OUTPUT[1])
            else:
                want = sum_over_parts(flat, whole.up.weight.detach().t(), gemm, _GRAD_INPUT, ranks)
            assert distance(mine[1].flatten(0, 1), want) < 2e-6, name
        assert distance(mine[1], gx) < (2e-6 if name in SUMS[1] else loose), name

        # by inputs
        x, g = tokens(HIDDEN, 4), tokens(IN, 5) * 1e-3
        y, gx, gw, gb = gradients(whole.down, x, g)
        mine = gradients(spread.down, x.chunk(ranks, -1)[rank], g)
        rows = x.flatten(0, 1)
        want = sum_over_parts(rows, whole.down.weight.detach(), how.output, _OUTPUT, ranks) + whole.down.bias.detach()
        assert distance(mine[0].flatten(0, 1), want) < 2e-6, name
        assert distance(mine[0], y) < (2e-6 if name in SUMS[0] else loose), name
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
    return [y.detach(), x.grad, *(gathered(p.grad) for p in mlp.parameters())]


def variants(mesh: DeviceMesh, first: bool = True) -> None:
    """Sequence parallel, DTensors between the layers, layers converted when they are cut already: the same bits.
    first: whether the first recipe has a bias; the others take turns."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sequence = {
        "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    inside = {
        "up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False),
    }  # fmt: skip
    for name, bias in zip(RECIPES, itertools.cycle((first, not first)), strict=False):
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


def recomputed(mesh: DeviceMesh) -> None:
    """Checkpointed activations: what is exchanged is exchanged again."""
    x, found = tokens(IN, 2), []
    for forward in (lambda mlp: mlp(x), lambda mlp: checkpoint(mlp, x, use_reentrant=False)):
        mlp = parallelize_module(model("nvfp4"), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        forward(mlp).square().sum().backward()
        found.append([p.grad.to_local() for p in mlp.parameters()])
    assert all(map(torch.equal, *found))


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
    """One graph, the bits of eager mode: scales of whole matrices and of their scales, chance and Hadamard."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    x, g = tokens(HIDDEN, 4).chunk(ranks, -1)[rank], tokens(IN, 5)
    how = RECIPES["nvfp4"].with_(output=RECIPES["tensorwise"].output)
    layer = parallelize_module(model(how).down, mesh, RowwiseParallel())
    want = gradients(layer, x, g)
    torch._dynamo.reset()
    assert all(map(torch.equal, gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), x, g), want))
    torch._dynamo.reset()


@torch.no_grad()
def uneven_compiled(mesh: DeviceMesh) -> None:
    """Exchanges of ranks with parts of different sizes stay out of graphs: inductor would order them differently."""
    x = tokens(IN, 2)
    for name, within in (("mxfp4", True), ("tensorwise", False)):
        layer = parallelize_module(model(name, hidden=51).up, mesh, ColwiseParallel())
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=within)
        assert torch.equal(compiled(x), layer(x)), name
    torch._dynamo.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    refuses(torch._dynamo.exc.Unsupported, "the layer is sharded unevenly", lambda: whole(x))
    torch._dynamo.reset()


def not_finite(mesh: DeviceMesh) -> None:
    """What is not finite on one rank is seen on all where all share a scale."""
    for name in ("tensorwise", "nvfp4", "bitnet"):
        mlp = model(name)
        with torch.no_grad():
            mlp.up.weight[HIDDEN - 1, 0] = torch.inf  # of the last rank
        spread = parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert not spread.up(tokens(IN, 0)).isfinite().any(), name
        assert not spread(tokens(IN, 0)).isfinite().any(), name


def refused(mesh: DeviceMesh) -> None:
    x, w, b = torch.randn(3, 32), torch.randn(16, 32), torch.randn(16)
    by_rows, everywhere = distribute_tensor(w, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Replicate()])
    refuses(ValueError, "weight [16, 32] is a DTensor with (Shard(dim=0),); either all must be DTensors or none. "
            "parallelize_module converts all of them", lambda: linear(x, by_rows))  # fmt: skip
    refuses(ValueError, "input [3, 32] is a DTensor with (Replicate(),), weight [16, 32] is a plain tensor",
            lambda: linear(everywhere, w))  # fmt: skip
    refuses(ValueError, "bias [16] is a plain tensor", lambda: linear(everywhere, by_rows, b))
    pending = DTensor.from_local(w, mesh, [Partial()], run_check=False)
    refuses(ValueError, "a weight [16, 32] is placed as (Partial(sum),)", lambda: linear(everywhere, pending))
    refuses(ValueError, "Use ColwiseParallel or RowwiseParallel", lambda: linear(everywhere, pending))
    side = Operand(QuantSpec(pw.get_format("uint4"), None, offset=torch.float32), "own rule")
    how = RECIPES["int8"].with_(output=RECIPES["int8"].output.__class__(None, side))
    refuses(ValueError, "one scale by rule 'own rule', which cannot be computed across ranks",
            lambda: linear(everywhere, by_rows, None, how))  # fmt: skip


def dtypes(mesh: DeviceMesh) -> None:
    """bfloat16 and autocast, as one device has them."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name in ("tensorwise", "mxfp8"):
        for half in (True, False):
            whole = model(name).to(torch.bfloat16 if half else torch.float32)
            up, down = copy.deepcopy(whole.up), copy.deepcopy(whole.down)
            spread = parallelize_module(up, mesh, ColwiseParallel()), parallelize_module(down, mesh, RowwiseParallel())
            x, h = tokens(IN, 2), tokens(HIDDEN, 3)
            if half:
                x, h = x.bfloat16(), h.bfloat16()
            with torch.autocast("cpu", torch.bfloat16, enabled=not half):
                one, two = whole.up(x), whole.down(h)
                mine, theirs = spread[0](x), spread[1](h.chunk(ranks, -1)[rank])
            assert mine.dtype is theirs.dtype is torch.bfloat16
            assert torch.equal(mine, one.chunk(ranks, -1)[rank])
            assert distance(theirs, two) < 1e-2
            mine.sum().backward()
            assert up.weight.grad.dtype is up.weight.dtype


def two(mesh: DeviceMesh) -> None:
    layers(mesh)
    variants(mesh)
    recomputed(mesh)
    trains(mesh)
    compiled(mesh)
    uneven_compiled(mesh)
    not_finite(mesh)
    refused(mesh)
    dtypes(mesh)


def uneven(mesh: DeviceMesh) -> None:
    """Ranks with fewer rows, or none: they take part in what is exchanged."""
    for name in ("tensorwise", "nvfp4", "bitnet", "mxfp4"):
        for hidden in (50, 3):
            torch.manual_seed(1)
            whole = MLP(IN, hidden)
            pw.quantize_(whole, LowPrecisionTrainingConfig(name, least=1))
            spread = parallelize_module(
                copy.deepcopy(whole), mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            )
            x, g = tokens(IN, 2).requires_grad_(), tokens(IN, 3)
            y = spread(x)
            y.backward(g)
            if name == "tensorwise":
                one = tokens(IN, 2).requires_grad_()
                want = whole(one)
                want.backward(g)
                pairs = [(y, want), (x.grad, one.grad)]
                pairs += [
                    (p.grad.full_tensor(), q.grad) for p, q in zip(spread.parameters(), whole.parameters(), strict=True)
                ]
                for got, expected in pairs:
                    assert distance(got, expected) < 1e-5
            assert all(p.grad.full_tensor().isfinite().all() for p in spread.parameters()), (name, hidden)


def by_tokens(mesh: DeviceMesh) -> None:
    """A weight that every rank has whole, and tokens that are cut: scales of the whole input, a sum of gradients."""
    x, w, g = torch.randn(6, 5, 64), torch.randn(32, 64), torch.randn(6, 5, 32)
    for t in (x, w, g):
        dist.broadcast(t, 0)
    for name in ("tensorwise", "nvfp4"):
        one = [t.clone().requires_grad_() for t in (x, w)]
        y = linear(*one, None, name)
        y.backward(g)
        spread = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, Shard(1)), (w, Replicate()))]
        mine = linear(*spread, None, name)
        mine.backward(distribute_tensor(g, mesh, [Shard(1)]))
        assert mine.placements == (Shard(1),)
        assert torch.equal(mine.full_tensor(), y), name
        assert spread[1].grad.placements == (Partial(),)
        if name == "tensorwise":
            assert distance(spread[0].grad.full_tensor(), one[0].grad) < 1e-6
            assert distance(spread[1].grad.full_tensor(), one[1].grad) < 1e-6


def two_axes() -> None:
    """FSDP2 changes nothing, over tensor parallel or alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    for name in ("tensorwise", "rowwise", "mxfp4", "bitnet"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        both = parallelize_module(model(name), mesh["layers"], plan)
        cut, alone = copy.deepcopy(both), model(name)
        fully_shard(both, mesh=mesh["data"])
        assert all(map(torch.equal, everything(both), everything(cut)))  # the mean of two equal gradients
        want = everything(alone)
        fully_shard(alone, mesh=mesh["data"])
        assert all(map(torch.equal, everything(alone), want))
    x = distribute_tensor(tokens(IN, 0), mesh, [Replicate()] * 2)
    refuses(ValueError, "call a layer under fully_shard through its module", lambda: linear(x, both.up.weight))


def four(mesh: DeviceMesh) -> None:
    uneven(mesh)
    by_tokens(mesh)
    two_axes()


def test_two_ranks() -> None:
    spawn(two, 2)


@pytest.mark.exhaustive
def test_variants_of_each_recipe_the_other_way() -> None:
    """With a bias where test_two_ranks has none."""
    spawn(variants, 2, False)


def test_parts_are_rounded_independently() -> None:
    """Errors of ranks add up as those of one device's rows do: their correlation is that of 16384 random numbers."""
    g = torch.randn(128, 256)
    for name in ("mxfp4", "nvfp4", "int8_hadamard"):
        side = RECIPES[name].grad_input.a
        off = [value(part, side, _GRAD_INPUT[0]) - part.double() for part in g.chunk(2, 1)]
        assert abs(float(torch.corrcoef(torch.stack(off).flatten(1))[0, 1])) < 5 / 16384**0.5, name


def test_four_ranks_uneven_parts_and_two_axes() -> None:
    spawn(four, 4)
