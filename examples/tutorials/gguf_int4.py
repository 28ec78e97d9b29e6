"""From a GGUF file to torch's int4 kernel: unpack Q4_0, pack for the CPU, multiply. And the same in one line.

python examples/tutorials/gguf_int4.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.numerics import Parts
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.gguf_file import File, Writer
from pennyweight.io.gguf.metadata import Value
from pennyweight.io.gguf.quantize import quantize

N, K, GROUP = 512, 1024, 32


def write_model(path: Path) -> Tensor:
    """Write a GGUF file with one Q4_0 matrix [N, K]; returns its dequantized values."""
    q4_0 = TYPES["Q4_0"]
    parts = quantize(torch.randn(N, K) * 0.05, "Q4_0")
    writer = Writer(str(path), {"general.architecture": Value("string", "none")}, {"up.weight": (q4_0, (N, K))})
    writer.put("up.weight", q4_0.encode(parts, (N, K)))
    writer.finish()
    return pw.AffineQuantizedTensor(parts, q4_0.spec, (N, K)).dequantize()


def by_hand(path: Path, x: Tensor) -> Tensor:
    """x @ weight.T with torch's int4 kernel, from the bytes of the file."""
    with File(str(path)) as file:
        entry = file.entries["up.weight"]
        print(f"{entry.type.name} {list(entry.shape)}: {entry.row_bytes} bytes per row, {entry.type.nbytes} per block")
        parts: Parts = entry.type.decode(file.mapped("up.weight"), entry.shape)
    codes, scale = parts.codes, parts.scale  # uint8 [N, K] of 0 to 15; float16 [N, K/32]; the zero is 8 for all
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    # x = (code - 8) * scale + zero in tinygemm's convention, as [K/32, N, 2]
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous().to(x.dtype)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, pairs)


def in_one_line(path: Path, x: Tensor) -> Tensor:
    """The same weight loaded into a layer, packed for the fastest kernel of this machine."""
    model = nn.ModuleDict({"up": nn.Linear(K, N, bias=False)})
    names = path.with_name("names.toml")  # because the architecture is unknown
    names.write_text('[tensors]\n"up.weight" = "up.weight"\n')
    pw.load(path, model, names=names)
    rows = str(pw.explain(x, model["up"].weight)).splitlines()
    print(model["up"].weight.spec, "with", next(row.split()[0] for row in rows if "RUNS" in row))
    return model["up"](x)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        weight = write_model(path)
        x = torch.randn(4, K)
        exact = x @ weight.T
        for name, y in (("by hand", by_hand(path, x)), ("in one line", in_one_line(path, x))):
            error = float((y - exact).norm() / exact.norm())
            print(f"{name}: relative error {error:.1e}")
            assert error < 1e-2


if __name__ == "__main__":
    main()
