"""Files that torchao 0.9, 0.12 and 0.18 wrote with torch.save: the same weights, and layers that compute the same."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import pennyweight as pw
from pennyweight.kernels.torch_int4 import _byte_order

FOLDER = Path(__file__).parents[3] / "tests" / "golden" / "torchao_pickles"
FILES = sorted(FOLDER.glob("*.pt"), key=lambda p: p.name)
# Codes packed by aten lie in the order of the CPU that packed them, an AVX512 one, and nothing in the file says so.
OPAQUE = ("int4cpu", "int4opaque")
# What torchao computed in bfloat16 from dequantized weights, or scaled in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def expected(file: Path) -> dict[str, torch.Tensor]:
    version, _, name = file.stem.partition("_")
    values = load_file(FOLDER / f"{version}.safetensors")
    return {key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")}


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
@torch.no_grad()
def test_weights_and_results_are_those_that_torchao_had(file: Path) -> None:
    if file.stem.endswith(OPAQUE) and _byte_order() != (64, True):
        pytest.skip("packed by aten for AVX512, which this CPU has not")
    state, told = torch.load(file, weights_only=True), expected(file)
    weight = state["weight"]
    assert type(weight) is pw.AffineQuantizedTensor
    assert weight.shape == told["weight"].shape
    value = weight.dequantize()
    if "int4opaque" in file.stem or "int4cpu" in file.stem:  # torchao rounds the product and the sum, we the whole
        torch.testing.assert_close(value, told["weight"], rtol=2**-7, atol=2**-8)
    else:
        assert torch.equal(value, told["weight"].to(value.dtype))
    if "x" in told:
        y = F.linear(told["x"], weight)
        assert y.dtype == told["y"].dtype
        assert (y.float() - told["y"].float()).norm() <= TOLERANCE[y.dtype] * told["y"].float().norm()


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ["0.9.0_int8wo", "0.12.0_8da4w", "0.18.0_8dax4", "0.18.0_fp8wo"])
@torch.no_grad()
def test_a_loaded_weight_is_a_weight_like_others(name: str, tmp_path: Path) -> None:
    """It goes into a model, is saved in our own form and by torch.save, and computes the same after that."""
    told = expected(FOLDER / f"{name}.pt")
    layer = nn.Linear(64, 32, bias=False, dtype=told["x"].dtype)
    layer.load_state_dict(torch.load(FOLDER / f"{name}.pt", weights_only=True), assign=True)
    assert isinstance(layer.weight, nn.Parameter)
    y = layer(told["x"])
    pw.save(layer, tmp_path / "own")
    torch.save(layer.state_dict(), tmp_path / "pickle.pt")
    for again in (pw.load(tmp_path / "own"), torch.load(tmp_path / "pickle.pt", weights_only=True)):
        assert torch.equal(again["weight"].dequantize(), layer.weight.dequantize())
        assert again["weight"].act == layer.weight.act
    pw.inference.freeze_(layer)
    assert torch.equal(layer(told["x"]), y)


@pytest.mark.usefixtures("torchao")
def test_an_unsafe_load_gives_the_same() -> None:
    file = FOLDER / "0.12.0_int8dyn.pt"
    safe, unsafe = torch.load(file, weights_only=True), torch.load(file, weights_only=False)
    assert torch.equal(safe["weight"].dequantize(), unsafe["weight"].dequantize())
    assert safe["weight"].act == unsafe["weight"].act
