"""A new data type: as one line of data, or, if that is not enough, as a tensor class with generated operations.

python examples/tutorials/my_dtype.py
"""

import copy
import io
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import Format, small_float, table
from pennyweight_torchao.utils import TorchAOBaseTensor

# -- as data: a format is a finite set of values, in 1 to 8 bits -----------------------------------------------------

POW4 = table("pow4", tuple(sorted([0.0, *(sign * 2.0**-k for k in range(7) for sign in (1, -1))])))  # powers of two
E3M1 = small_float("e3m1", 3, 1)  # a 5-bit float: a sign, three bits of exponent, one of mantissa
INT5_EVEN = Format("int5_even", 5, "int", torch.int8, -15, 15)  # symmetric 5-bit integers, without -16


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)).eval()


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """Round each element of x to the nearest of the numbers."""
    return numbers[(x.unsqueeze(-1) - numbers).abs().argmin(-1)]


@torch.no_grad()
def by_data() -> None:
    reference, x = network(), torch.randn(5, 256)
    for fmt in (POW4, E3M1, INT5_EVEN):
        model = copy.deepcopy(reference)
        report = pw.quantize_(model, pw.SpecConfig(pw.QuantSpec(fmt, (32,))))
        weight = model[0].weight
        print(f"{fmt}: {weight.error(reference[0].weight):.1f} dB; {report.summary()}")
        print(f"  {8 * weight.nbytes / weight.numel():.2f} bits per weight, scales included")

        # Each value is the nearest of the format's values times the scale of its block of 32.
        numbers = fmt.decode(weight.codes.unique())
        scale = weight.scale.repeat_interleave(32, 1)
        torch.testing.assert_close(weight.dequantize(), nearest(reference[0].weight / scale, numbers) * scale)

        # Products, slices, packed bits and files work too.
        torch.testing.assert_close(x @ weight.t(), F.linear(x, weight.dequantize()), rtol=1e-4, atol=1e-4)
        assert weight[:64].spec.format is fmt
        with tempfile.TemporaryDirectory() as folder:
            pw.save(model, folder)
            assert torch.equal(pw.load(folder, network())(x), model(x))


# -- as a class: 16-bit codes, too many bits for a format ------------------------------------------------------------


class Int16Tensor(TorchAOBaseTensor):
    """int16 codes and one scale per row. The generated operations need only the names below."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["dtype"]  # noqa: RUF012

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> "Int16Tensor":
        return Tensor._make_wrapper_subclass(cls, qdata.shape, device=qdata.device, dtype=dtype)

    def __init__(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def from_float(cls, x: Tensor) -> "Int16Tensor":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30).float() / 32767
        return cls((x / scale).round().to(torch.int16), scale, x.dtype)

    def dequantize(self) -> Tensor:
        return (self.qdata * self.scale).to(self.dtype)


@Int16Tensor.implements_torch_function([F.linear])
def int16_linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, bias = (*args, kwargs.get("bias"))[:3]
    return F.linear(x, weight.dequantize(), bias)


@Int16Tensor.implements([torch.ops.aten.slice.Tensor])
def int16_slice(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    weight, dim, *ends = args
    scale = func(weight.scale, dim, *ends) if dim == 0 else weight.scale  # a row keeps its scale
    return Int16Tensor(func(weight.qdata, dim, *ends), scale, weight.dtype)


@dataclass(frozen=True)
class Int16Config(pw.AOBaseConfig):
    """int16 weights; connects the class to quantize_."""


@pw.register_quantize_module_handler(Int16Config)
def to_int16(module: nn.Linear, config: Int16Config) -> nn.Linear:
    module.weight = nn.Parameter(Int16Tensor.from_float(module.weight.detach()), requires_grad=False)
    return module


@torch.no_grad()
def by_class() -> None:
    reference, x = network(), torch.randn(5, 256)
    model = copy.deepcopy(reference)
    pw.quantize_(model, Int16Config())
    weight, y = model[0].weight, model(x)
    assert isinstance(weight, Int16Tensor)
    error = float((y - reference(x)).norm() / reference(x).norm())
    print(f"Int16Tensor of {list(weight.shape)}: relative error of the outputs {error:.0e}")
    assert error < 1e-4
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), y)

    # detach, clone, copies and moves come from the base class; slicing is registered above.
    for same in (weight.detach(), weight.clone(), copy.deepcopy(weight), weight.to("cpu")):
        assert isinstance(same, Int16Tensor)
        assert torch.equal(same.qdata, weight.qdata)
    assert torch.equal(weight[:10].dequantize(), weight.dequantize()[:10])
    target = Int16Tensor.from_float(torch.zeros(128, 256))
    target.copy_(weight.data)
    assert torch.equal(target.dequantize(), weight.dequantize())

    # torch.load reads it back once the class is declared safe.
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.serialization.safe_globals([Int16Tensor]):
        state = torch.load(file, weights_only=True)
    again = network()
    again.load_state_dict(state, assign=True)
    assert torch.equal(again(x), y)

    # A missing operation raises an error. A format defined as data would support it.
    try:
        weight.softmax(0)
    except NotImplementedError as error:
        print(f"softmax: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("an operation that is not registered ran")


def main() -> None:
    torch.manual_seed(0)
    by_data()
    by_class()


if __name__ == "__main__":
    main()
