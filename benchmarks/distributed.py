"""Bytes that FSDP2's all-gather puts on the wire, for frozen quantized parameters and for trainable ones.

    python benchmarks/distributed.py [--ranks 2] [--width 1024] [--markdown]

Counts what one rank gives to the collective in one forward of an MLP (width x 4 width x width, with biases), beside
float32 and bfloat16 of the same model. Bytes are the same on every machine; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pennyweight as pw
import pennyweight.distributed as pwd
from pennyweight.core.formats import E4M3, INT8

FROZEN = {
    "Int8WeightOnlyConfig()": pw.Int8WeightOnlyConfig(),
    "Float8WeightOnlyConfig()": pw.Float8WeightOnlyConfig(),
    "Int4WeightOnlyConfig(group_size=128)": pw.Int4WeightOnlyConfig(group_size=128),
    "NVFP4WeightOnlyConfig()": pw.NVFP4WeightOnlyConfig(),
    "NF4WeightOnlyConfig()": pw.NF4WeightOnlyConfig(),
}
TRAINABLE = {
    "int8, blocks of 128": pw.QuantSpec(INT8, (128,)),
    "float8 e4m3, blocks of 128": pw.QuantSpec(E4M3, (128,)),
}


# torch 2.11 has it under its former name
GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Counting:
    """torch's all-gather, counting the bytes that it is given."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent += input_tensor.nbytes
        return GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


def work(rank: int, ranks: int, width: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def sent(config: Any = None, spec: Any = None) -> int:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        if config is not None:
            pw.quantize_(model, config)
        fully_shard(model, mesh=mesh)
        comm = Counting() if spec is None else pwd.QuantizedAllGather(spec)
        model.set_custom_all_gather(comm)
        with torch.no_grad():
            model(torch.randn(2, width))
        return comm.sent

    found = {"float32": sent()}
    found |= {f"frozen, {name}": sent(config) for name, config in FROZEN.items()}
    found |= {f"trainable, {name}": sent(spec=spec) for name, spec in TRAINABLE.items()}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, args.width, folder), nprocs=args.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    floats = found["float32"]
    if args.markdown:
        print("| parameters | bytes of a rank | of float32 | of bfloat16 |\n|---|---|---|---|")
    for name, count in found.items():
        row = (name, f"{count:,}", f"{count / floats:.3f}", f"{2 * count / floats:.3f}")
        print(f"| {' | '.join(row)} |" if args.markdown else f"{row[0]:50} {row[1]:>12} {row[2]} {row[3]}")


if __name__ == "__main__":
    main()
