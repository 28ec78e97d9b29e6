"""Other libraries' writers, as rows of tables: each loads back to the same outputs, or refuses with our sentence."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.storage import REFUSAL

CONFIGS: dict[str, pw.AOBaseConfig] = {
    "int8": pw.Int8WeightOnlyConfig(),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int4": pw.Int4WeightOnlyConfig(32),
    "float8": pw.Float8WeightOnlyConfig(),
    "nf4": pw.NF4WeightOnlyConfig(),
    "nvfp4": pw.NVFP4WeightOnlyConfig(),
}
X = torch.linspace(-1, 1, 3 * 64).view(3, 64)


@dataclass(frozen=True)
class Writer:
    """One way to write a model's weights.

    write  (model, folder)
    read   (folder, a model like it that holds other numbers) -> the model that was written. None: it must refuse
    """

    write: Callable[[Any, Path], Any]
    read: Callable[[Path, Any], Any] | None = None


def pair() -> nn.Module:
    """Two weights of one size, and a bias: what looks shared where only sizes are compared."""
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 32))


def tied() -> nn.Module:
    model = pair()
    model[1].weight = model[0].weight
    return model


def mixed() -> nn.Module:
    """A quantized weight beside a float layer of the same size."""
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64))


def quantized(make: Callable[[], nn.Module], name: str) -> nn.Module:
    torch.manual_seed(7)
    model = make().eval()
    picks = (lambda module, fqn: fqn == "0") if make is mixed else None
    pw.quantize_(model, CONFIGS[name], picks)
    return model


MODELS = {"two of one size": pair, "tied": tied, "float beside it": mixed}


@torch.no_grad()
def forward(model: nn.Module) -> Tensor:
    return model(X)


def check_on_models(writer: Writer, make: Callable[[], nn.Module], config: str, folder: Path) -> None:
    """The writer's row, on a quantized model, read into one with other numbers."""
    torch.manual_seed(3)
    other = quantized(make, config)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    check(writer, quantized(make, config), other, folder)


def check(writer: Writer, model: Any, other: Any, folder: Path, call: Callable[[Any], Tensor] = forward) -> None:
    """The writer's row, on a model. other: one like it, with other numbers."""
    exact = call(model)
    if writer.read is None:
        with pytest.raises(BaseException, match=re.escape(REFUSAL)):  # DCP's own is no Exception
            writer.write(model, folder)
    else:
        writer.write(model, folder)
        assert torch.equal(call(writer.read(folder, other)), exact)
    assert torch.equal(call(model), exact)
    assert_bytes_are_tensors(folder, model)


def assert_bytes_are_tensors(folder: Path, model: Any) -> None:
    """No file has, under the name of a quantized weight, anything but its float value or our guard, an empty tensor."""
    weights = {n: t for n, t in model.state_dict().items() if isinstance(t, pw.AffineQuantizedTensor)}
    for path in folder.rglob("*.safetensors"):
        if path.stat().st_size == 0:  # DCP opens its file before it asks for the bytes
            continue
        for name, held in safetensors.torch.load_file(path).items():
            if name in weights and held.shape != (0,):
                torch.testing.assert_close(held, weights[name].dequantize(held.dtype), rtol=0, atol=0)
