"""Tensor parallel: the weights of a quantized MLP sharded by columns and by rows over two processes with DTensor.

python examples/tensor_parallel.py
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import pennyweight as pw
from pennyweight.core.formats import INT8

PROCESSES = 2
CONFIGS = [
    pw.Int8WeightOnlyConfig(),
    pw.Int4WeightOnlyConfig(group_size=32),
    pw.Int8DynamicActivationInt8WeightConfig(),
]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def shard(weight: Tensor, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """This process's piece of a weight [N, K]: rows of it for dim 0, whole groups of each row for dim 1.

    The piece is cut from the codes, never from floats; it is then packed for the kernel that the whole was packed for.
    """
    piece = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    if isinstance(piece, pw.AffineQuantizedTensor):
        piece = piece.to_layout(weight.spec.layout)
    return nn.Parameter(DTensor.from_local(piece, mesh, [Shard(dim)], run_check=False), requires_grad=False)


def replicate(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False)


def shard_mlp_(model: MLP, mesh: DeviceMesh) -> None:
    """``up`` by output features ("column-wise", as its transpose stands in the product), ``down`` by input features.

    Between them nothing is sent: each process has the hidden features that its part of ``down`` wants.
    """
    model.up.weight, model.up.bias = shard(model.up.weight, 0, mesh), shard(model.up.bias, 0, mesh)
    model.down.weight = shard(model.down.weight, 1, mesh)
    model.down.bias = nn.Parameter(replicate(model.down.bias, mesh), requires_grad=False)


def compile_for(model: nn.Module, config: pw.AOBaseConfig) -> nn.Module:
    """torch.compile, with the scheme in the name under which torch's cache keeps the graphs.

    torch 2.13 names the graph of a DTensor by its mesh, placement, shape and dtype, and not by the tensor within: two
    schemes of one shape would get one graph, and the second model the outputs of the first.
    """
    torch.compiler.config.cache_key_tag = str(config)
    return torch.compile(model, fullgraph=True)


@torch.no_grad()
def products(mesh: DeviceMesh) -> None:
    """The calls that layers are made of, one by one: where a sharded weight leaves its result."""
    x, w = torch.randn(5, 64), pw.AffineQuantizedTensor.from_float(torch.randn(32, 64), pw.QuantSpec(INT8, (16,)))
    by_rows, by_columns = shard(w, 0, mesh), shard(w, 1, mesh)
    everywhere, bias = replicate(x, mesh), replicate(torch.randn(32), mesh)
    half = DTensor.from_local(x.chunk(2, 1)[mesh.get_local_rank()], mesh, [Shard(1)], run_check=False)
    calls = {
        "F.linear, column-wise": nn.functional.linear(everywhere, by_rows),
        "F.linear, row-wise": nn.functional.linear(half, by_columns),
        "mm, column-wise": torch.mm(everywhere, by_rows.t()),
        "mm, row-wise": torch.mm(half, by_columns.t()),
        "addmm, column-wise": torch.addmm(bias, everywhere, by_rows.t()) - bias,
    }
    for name, y in calls.items():
        say(f"{name}: {y.placements[0]}")
        torch.testing.assert_close(y.full_tensor(), nn.functional.linear(x, w), rtol=1e-4, atol=1e-4)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


@torch.no_grad()
def work(rank: int, meeting_place: str) -> None:
    """What each process does. All have the same seed, so all have the same whole model to cut their part from."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    products(mesh)
    model, x = MLP().eval(), torch.randn(7, 128)
    for config in CONFIGS:
        whole = copy.deepcopy(model)
        pw.quantize_(whole, config)
        y, bytes_whole = whole(x), whole.up.weight.nbytes
        shard_mlp_(whole, mesh)
        local = whole.up.weight.to_local()
        assert isinstance(local, pw.AffineQuantizedTensor)
        assert local.nbytes == bytes_whole // 2
        eager = whole(replicate(x, mesh)).full_tensor()
        compiled = compile_for(whole, config)(replicate(x, mesh)).full_tensor()
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        difference = float((eager - y).norm() / y.norm())
        say(f"{config}: {local.nbytes} of {bytes_whole} bytes here; {difference:.1e} from the whole model")
        # With dynamic activations each process scales the inputs that it sees: half of each row in ``down``. That is
        # finer than one scale for the whole row, and not the same.
        assert difference < (2e-2 if local.act else 1e-5)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "rendezvous"),), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
