"""Tensor parallel with PyTorch's own functions: equal to one device, for every config."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pennyweight as pw
import pennyweight.distributed as pwd
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.repack import prepare
from tests.distributed.group import CASES, DYNAMIC, SOME, build, inputs, mlp, refuses, same_bits, spawn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def parallel(model: nn.Module, mesh: DeviceMesh, rows: Any = RowwiseParallel) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": rows()})


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def every_config(mesh: DeviceMesh) -> None:
    x, rank = inputs(), mesh.get_local_rank()
    for text in CASES:
        whole = mlp(text)
        model = parallel(copy.deepcopy(whole), mesh)
        up, y = whole.up(x), whole(x)
        local: Any = model.up.weight._local_tensor
        assert isinstance(local, QT), text
        assert local.spec == prepare(local).spec, text  # packed for its kernel
        assert not local.readonly
        assert torch.equal(model.up(x), up.chunk(mesh.size(), 1)[rank]), text
        for name in ("up", "down"):
            got = model.get_parameter(f"{name}.weight").full_tensor()
            assert same_bits(got, whole.get_parameter(f"{name}.weight")), text
        assert distance(model(x), y) < (5e-2 if text in DYNAMIC else 1e-6), text
        if text == "pw.NVFP4DynamicActivationNVFP4WeightConfig()":  # a scale of the whole input above those of blocks
            with pytest.raises(ValueError, match=r"quantized under a scale of the whole input.*RowwiseParallel"):
                parallel(copy.deepcopy(whole), mesh, pwd.RowwiseParallel)
        elif text in DYNAMIC:
            assert distance(parallel(copy.deepcopy(whole), mesh, pwd.RowwiseParallel)(x), y) < 1e-6, text


@torch.no_grad()
def two(mesh: DeviceMesh) -> None:
    every_config(mesh)
    # By one rank's tensor, or by everyone's own.
    w = mlp(SOME[0], seed=mesh.get_local_rank()).up.weight.detach()
    mine = distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None).to_local()
    assert same_bits(mine, w.chunk(2)[mesh.get_local_rank()].clone())
    theirs = distribute_tensor(w, mesh, [Replicate()]).to_local()
    assert same_bits(theirs, mlp(SOME[0], seed=0).up.weight)
    # Cut through blocks: finer ones where scales are plain, else a sentence that says what to do.
    w = QT.from_float(torch.ones(8, 192) * torch.arange(192), pw.QuantSpec(INT4, (128,)))
    cut = distribute_tensor(w, mesh, [Shard(1)])
    assert cut.to_local().spec.block == (32,)
    assert torch.equal(cut.full_tensor().dequantize(), w.dequantize())
    nested = mlp("pw.NF4WeightOnlyConfig()", inputs=192).up.weight.detach()
    refuses(ValueError, "Choose a group size that divides 96", lambda: distribute_tensor(nested, mesh, [Shard(1)]))
    ordered = QT.from_float(torch.randn(8, 64), pw.QuantSpec(INT8, (-1,))).with_(perm=torch.randperm(64))
    refuses(ValueError, "its channels are permuted", lambda: distribute_tensor(ordered, mesh, [Shard(1)]))
    # Ranks that do not hold the same kind of tensor are told so, all of them.
    other = mlp(SOME[mesh.get_local_rank()]).up.weight.detach()
    refuses(ValueError, "ranks have different", lambda: distribute_tensor(other, mesh, [Shard(0)]))
    refuses(TypeError, "exchange w.dequantize()", lambda: dist.all_reduce(other))
    grouped = mlp("pw.Int8DynamicActivationInt8WeightConfig(act_group_size=48)")  # 64 columns of down on each rank
    cut = "has 64 columns of its input, which cut through the groups of 48"
    refuses(ValueError, cut, lambda: parallel(grouped, mesh, pwd.RowwiseParallel))
    quantize_later(mesh)
    compiled(mesh)


def quantize_later(mesh: DeviceMesh) -> None:
    x = inputs()
    for text in SOME:
        whole, model = mlp(text), parallel(mlp(), mesh)
        report = pw.quantize_(model, build(text))
        assert "sharded: S(0)" in report.rows[0].note
        for name in ("up", "down"):
            assert same_bits(model.get_parameter(f"{name}.weight").full_tensor(), whole.get_parameter(f"{name}.weight"))
        assert distance(model(x), whole(x)) < (2e-2 if text in DYNAMIC else 1e-6), text
        again = pw.quantize_(model, build(text))
        assert all("already quantized" in r.note for r in again.quantized) or "PerBlock" in text
    data = [inputs()]
    model = parallel(mlp(), mesh)
    refuses(pw.PlanError, "then parallelize_module", lambda: pw.quantize_(model, build(SOME[2]), calibration=data))


def compiled(mesh: DeviceMesh) -> None:
    x, seen = inputs(), []

    def backend(graph: Any, given: Any) -> Any:
        seen.append(torch._functorch.config.enable_autograd_cache)
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    before = torch._functorch.config.enable_autograd_cache
    for text, rows in ((SOME[0], RowwiseParallel), (SOME[2], RowwiseParallel), (SOME[-1], pwd.RowwiseParallel)):
        model = parallel(mlp(text), mesh, rows)
        torch._dynamo.reset()
        assert torch.equal(pwd.compile(model, backend=backend, fullgraph=True)(x), model(x)), text
    assert seen == [False] * 3
    assert torch._functorch.config.enable_autograd_cache is before


def tables() -> None:
    """Embeddings, cut by features and by entries."""
    mesh, ids = init_device_mesh("cpu", (4,)), torch.arange(0, 64, 5)
    for config in (pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=16)):
        torch.manual_seed(0)
        whole = nn.Embedding(64, 64)
        pw.quantize_(whole, config, filter_fn=lambda module, name: True)
        y = whole(ids)
        by_feature = parallelize_module(copy.deepcopy(whole), mesh, ColwiseParallel())
        assert torch.equal(by_feature(ids), y.chunk(4, 1)[mesh.get_local_rank()])
        by_entry = parallelize_module(copy.deepcopy(whole), mesh, RowwiseParallel(input_layouts=Replicate()))
        assert torch.equal(by_entry(ids), y)


@torch.no_grad()
def four(mesh: DeviceMesh) -> None:
    x = inputs()
    for text in SOME:
        if "NF4" in text:  # 32 of 128 inputs, 64 in a block
            continue
        whole = mlp(text)
        model = parallel(copy.deepcopy(whole), mesh, pwd.RowwiseParallel)
        assert torch.equal(model.up(x), whole.up(x).chunk(4, 1)[mesh.get_local_rank()]), text
        assert distance(model(x), whole(x)) < 1e-6, text
    tables()
    for rows in (50, 3):  # the last rank has fewer, or none
        for text in SOME:
            w = mlp(text, hidden=rows).up.weight.detach()
            cut = distribute_tensor(w, mesh, [Shard(0)])
            sizes = [len(c) for c in torch.empty(rows, 1).chunk(4)] + [0]
            assert cut.to_local().shape[0] == sizes[mesh.get_local_rank()]
            assert torch.equal(cut.full_tensor().dequantize(), w.dequantize()), (text, rows)


def test_two_ranks_are_one_device() -> None:
    spawn(two, 2)


def test_four_ranks_and_uneven_shards() -> None:
    spawn(four, 4)


def test_chunks_for_other_callers_are_as_they_were() -> None:
    w = mlp("pw.Int8WeightOnlyConfig()").up.weight.detach()
    assert all(piece.readonly for piece in w.chunk(2))
    assert type(w.new_zeros(3, 96)) is torch.Tensor
    pw.reset_fallbacks()
    with pytest.warns(pw.FallbackWarning, match="view"):
        flat = w.view(-1)
    assert type(flat) is torch.Tensor
