"""Tensor parallel: the weights of a quantized MLP sharded by columns and by rows over two processes with DTensor.

python examples/tutorials/tensor_parallel.py
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.distributed import RowwiseParallel, compile

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


@torch.no_grad()
def products(mesh: DeviceMesh) -> None:
    """The products that layers call, one by one, and the placements of their results for a sharded weight."""
    x, w = torch.randn(5, 64), pw.AffineQuantizedTensor.from_float(torch.randn(32, 64), pw.QuantSpec(INT8, (16,)))
    by_rows, by_columns = distribute_tensor(w, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(1)])
    everywhere, bias = (distribute_tensor(t, mesh, [Replicate()]) for t in (x, torch.randn(32)))
    half = distribute_tensor(x, mesh, [Shard(1)])
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
    """The work of each process. All have the same seed, so all shard the same model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    products(mesh)
    model, x = MLP().eval(), torch.randn(7, 128)
    for config in CONFIGS:
        whole = copy.deepcopy(model)
        pw.quantize_(whole, config)
        y, hidden, bytes_whole = whole(x), whole.up(x), whole.up.weight.nbytes
        parallelize_module(whole, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert isinstance(whole.up.weight, DTensor)
        local = whole.up.weight.to_local()
        assert isinstance(local, pw.AffineQuantizedTensor)
        assert local.nbytes == bytes_whole // 2
        assert torch.equal(whole.up(x), hidden.chunk(PROCESSES, 1)[rank])  # to the last bit
        eager = whole(x)
        compiled = compile(whole, fullgraph=True)(x)
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        difference = float((eager - y).norm() / y.norm())
        say(f"{config}: {local.nbytes} of {bytes_whole} bytes here; {difference:.1e} from the whole model")
        assert difference < 1e-6  # the sum over processes has another rounding order
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "rendezvous"),), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
