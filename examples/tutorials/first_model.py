"""Quantize a model, read the report, save it, load it, and run it without the tensor subclass.

python examples/tutorials/first_model.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import pennyweight as pw

CONFIGS = [
    pw.Int8WeightOnlyConfig(),
    pw.Int8DynamicActivationInt8WeightConfig(),
    pw.Int4WeightOnlyConfig(group_size=64),
    pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(64)),
]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def points(count: int, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around 40 centres; centre i belongs to class i % 10, so the classes are not linearly separable."""
    which = torch.randint(len(centres), (count,))
    return centres[which] + 0.85 * torch.randn(count, centres.shape[1]), which % 10


def trained() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A small network trained to classify such points, and test points with their classes."""
    centres = torch.randn(40, 64) / 2
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        x, label = points(256, centres)
        nn.functional.cross_entropy(model(x), label).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), *points(4000, centres)


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, label: torch.Tensor) -> float:
    return (model(x).argmax(1) == label).double().mean().item()


def main() -> None:
    torch.manual_seed(0)
    model, x, label = trained()
    full = accuracy(model, x, label)
    print(f"float32: {100 * full:.1f} % right\n")

    for config in CONFIGS:
        small = copy.deepcopy(model)
        report = pw.quantize_(small, config)
        got = accuracy(small, x, label)
        print(f"{config}: {100 * got:.1f} % right; {report.summary()}")
        assert report.bytes_after == sum(p.nbytes for p in small.parameters())
        if isinstance(config, pw.IntxWeightOnlyConfig):
            assert got < full - 0.01  # two bits are too few: measure on your own task
        else:
            assert abs(got - full) < 0.01

    # One full report: what was quantized, with which kernel, bytes and SQNR.
    small = copy.deepcopy(model)
    report = pw.quantize_(small, pw.Int4WeightOnlyConfig(group_size=64))
    print(f"\n{report}\n")
    report.check(min_sqnr=15, min_fraction=0.9)  # raises, naming the layers, where the model is not what you meant

    # A quantized weight behaves like a float weight.
    weight = small[2].weight
    print(weight)
    hidden = torch.randn(3, 512)
    torch.testing.assert_close(hidden @ weight.t(), nn.functional.linear(hidden, weight))
    assert weight[:100].shape == (100, 512)
    print(f"{weight.numel()} numbers in {weight.nbytes} bytes, {weight.error(model[2].weight):.1f} dB from float")
    assert weight.codes.max() < 16
    assert torch.equal(weight.dequantize(), copy.deepcopy(weight).dequantize())

    # Files are safetensors, without pickle. The model to fill may be on the meta device, where it needs no memory.
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        pw.save(small, folder)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        with torch.device("meta"):
            empty = network()
        again = pw.load(folder, empty)
        assert torch.equal(again(x), small(x))
        print(f"on disk {size} bytes; loaded again, the outputs are bit-equal to those of the saved model")

    # For inference, a layer can call its kernel without the tensor subclass, which saves a little at each call.
    before = small(x)
    pw.inference.freeze_(small)
    assert isinstance(small[2], pw.inference.FrozenLinear)
    assert torch.equal(small(x), before)
    assert list(small.state_dict()) == list(model.state_dict())
    pw.inference.thaw_(small)

    # Dequantize: plain tensors with the same values.
    pw.dequantize_(small)
    assert type(small[2].weight.data) is torch.Tensor
    print("frozen, thawed, dequantized: the same values in each step")


if __name__ == "__main__":
    main()
