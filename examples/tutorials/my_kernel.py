"""A custom kernel and the layout that it reads, in one file: five ternary weights per byte.

python examples/tutorials/my_kernel.py
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import INT4, TERNARY
from pennyweight.core.layouts import Layout, register_layout
from pennyweight.core.numerics import Parts
from pennyweight.kernels import Case, Kernel, register_kernel

DIGITS = 5  # 3**5 = 243 fits a byte: 1.6 bits per weight; the layout "bits" needs 2
ROW = pw.QuantSpec(TERNARY, (-1,))  # -1, 0 and 1 times one scale per row

# -- the layout: the packing of the codes in memory ----------------------------------------------------------------


def pack(parts: Parts, spec: pw.QuantSpec, shape: Sequence[int]) -> Parts:
    """codes [N, K] of -1, 0, 1 -> bytes [N, ceil(K / 5)], the first of five codes in the lowest digit."""
    codes = F.pad(parts.codes + 1, (0, -parts.codes.shape[-1] % DIGITS))
    digits = codes.to(torch.uint8).unflatten(-1, (-1, DIGITS))
    powers = torch.tensor([3**i for i in range(DIGITS)], dtype=torch.uint8, device=codes.device)
    return parts._replace(codes=(digits * powers).sum(-1, dtype=torch.uint8))


def unpack(parts: Parts, spec: pw.QuantSpec, shape: Sequence[int]) -> Parts:
    """The inverse, bit for bit."""
    codes = digits_of_bytes(parts.codes.device)[parts.codes.int()]
    return parts._replace(codes=codes.flatten(-2)[..., : shape[-1]])


def digits_of_bytes(device: torch.device) -> Tensor:
    """[256, 5]: the five codes of each byte."""
    byte = torch.arange(256, device=device)
    return torch.stack([byte // 3**i % 3 - 1 for i in range(DIGITS)], -1).to(torch.int8)


def fewer_bytes(spec: pw.QuantSpec, shape: Sequence[int]) -> int:
    """Difference to the bytes of the spec, which counts two bits per code; negative here."""
    *rows, width = shape
    return math.prod(rows) * (math.ceil(width / DIGITS) - math.ceil(width * spec.format.bits / 8))


register_layout(Layout("base3", pack, unpack, examples=((ROW, (3, 130)), (ROW, (2, 5))), extra=fewer_bytes))

# -- the kernel that reads it --------------------------------------------------------------------------------------


def run(x: Tensor, w: pw.AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = (x @ codes.T) * scale + bias. x: [.., K], w: [N, K]. The scale is applied to the result, once per row."""
    codes = unpack(w.parts, w.spec, w.stored_shape).codes
    y = F.linear(x, codes.to(x.dtype)) * w.scale.to(x.dtype).reshape(-1)
    return y if bias is None else y + bias


def accepts(case: Case) -> bool | str:
    """True, or the reason that explain() shows."""
    if case.spec.with_(layout="plain") != ROW:
        return "supports only ternary codes with one float32 scale per row"
    if case.act is not None:
        return "weight-only: the activation is not quantized"
    return len(case.shape) == 2 or "needs a 2-d weight"


register_kernel(Kernel("linear", "base3", run, accepts, layout="base3", rank=100))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1000, 512), nn.ReLU(), nn.Linear(512, 64)).eval(), torch.randn(7, 1000)
    report = pw.quantize_(model, pw.SpecConfig(ROW))
    weight = model[0].weight
    assert weight.spec.layout == "base3"  # quantize_ packs for the kernel that will run
    print(weight)

    # explain() lists every kernel of the table and why each was rejected.
    explanation = pw.explain(x, weight)
    print(explanation)
    assert {name: verdict for name, _, verdict in explanation.rows}["base3"] == "RUNS"
    assert all(row.kernel == "base3" for row in report.quantized)
    other = pw.AffineQuantizedTensor.from_float(torch.randn(8, 32), pw.QuantSpec(INT4, (32,)))
    print(next(f"int4 is rejected: {verdict}" for name, _, verdict in pw.explain(x, other).rows if name == "base3"))

    # The bytes are the true storage, and equal the planned ones.
    bits = weight.to_layout("bits")
    print(f"{weight.nbytes} bytes; {bits.nbytes} in the layout bits, {weight.to_layout('plain').nbytes} in plain")
    assert weight.nbytes == 512 * 200 + 4 * 512 < bits.nbytes
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())

    # Correctness: packing is exactly invertible, and outputs equal the plain reference, also compiled.
    assert torch.equal(bits.to_layout("base3").parts.codes, weight.parts.codes)
    assert torch.equal(bits.dequantize(), weight.dequantize())
    torch.testing.assert_close(model[0](x), F.linear(x, weight.dequantize(), model[0].bias), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))

    # Other operations work too: slices, products in both orders, gradients to the input.
    assert torch.equal(weight[:10].dequantize(), weight.dequantize()[:10])
    torch.testing.assert_close(weight @ x.t(), (x @ weight.t()).t())
    with torch.enable_grad():
        x.requires_grad_()
        model[0](x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
    print("packing exact; eager, compiled and gradients agree with the dequantized weight")


if __name__ == "__main__":
    main()
