"""Every kind of module that is a site: quantized it computes nearly what it did, undone exactly what its weight says.

A new kind needs a line in EXAMPLES.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning.parameters import Place, Site, kind_of, kinds, make_site


def hf_conv1d() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(48, 64)


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


# kind -> (module, input, how it is called)
EXAMPLES: dict[type | str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor]]]
EXAMPLES = {
    nn.Linear: (lambda: nn.Linear(64, 48), lambda: torch.randn(2, 5, 64), call),
    nn.MultiheadAttention: (lambda: nn.MultiheadAttention(64, 4), lambda: torch.randn(5, 2, 64), attend),
    nn.RNNCellBase: (lambda: nn.LSTMCell(64, 48), lambda: torch.randn(5, 64), first),
    "transformers.pytorch_utils.Conv1D": (hf_conv1d, lambda: torch.randn(2, 5, 64), call),
    nn.Embedding: (lambda: nn.Embedding(48, 64), lambda: torch.tensor([[1, 47], [3, 3]]), call),
    nn.Conv1d: (lambda: nn.Conv1d(16, 24, 4), lambda: torch.randn(2, 16, 9), call),
    nn.Conv2d: (lambda: nn.Conv2d(16, 24, 3), lambda: torch.randn(2, 16, 9, 9), call),
    nn.Conv3d: (lambda: nn.Conv3d(8, 24, 3), lambda: torch.randn(2, 8, 5, 5, 5), call),
    nn.ConvTranspose1d: (lambda: nn.ConvTranspose1d(32, 24, 4, 2), lambda: torch.randn(2, 32, 9), call),
    nn.ConvTranspose2d: (lambda: nn.ConvTranspose2d(32, 24, 4, 2, 1), lambda: torch.randn(2, 32, 9, 9), call),
    nn.ConvTranspose3d: (lambda: nn.ConvTranspose3d(32, 4, 3), lambda: torch.randn(2, 32, 5, 5, 5), call),
}
CONFIGS = [
    pw.Int8WeightOnlyConfig(),
    pw.Int8DynamicActivationInt8WeightConfig(),
    pw.Int4WeightOnlyConfig(group_size=32),
    pw.UIntXWeightOnlyConfig("uint6", 32),
    pw.Float8DynamicActivationFloat8WeightConfig(granularity=pw.PerRow()),
    pw.MXWeightOnlyConfig(),
]


def everything(module: nn.Module, fqn: str) -> bool:
    return True


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", list(kinds()), ids=str)
def test_site(kind: type | str, config: pw.AOBaseConfig) -> None:
    make, sample, run = EXAMPLES[kind]
    module, x = make().eval(), sample()
    floats = copy.deepcopy(module)
    exact = run(module, x).detach()
    expected = {n for n, p in module.named_parameters() if n.rpartition(".")[2] in kinds()[kind].params}
    report = pw.quantize_(module, config, everything)
    assert expected <= {r.name for r in report.quantized}
    assert sqnr(exact, run(module, x).detach()) > 17
    for name, p in module.named_parameters():
        if isinstance(p, AffineQuantizedTensor):
            assert p.shape == floats.get_parameter(name).shape
            assert p.error(floats.get_parameter(name).detach()) > 17
    values = {n: p.dequantize() for n, p in module.named_parameters() if isinstance(p, AffineQuantizedTensor)}
    pw.dequantize_(module)
    for name, value in values.items():
        assert torch.equal(module.get_parameter(name), value)
    floats.load_state_dict(module.state_dict())
    assert torch.equal(run(floats, x), run(module, x))


@pytest.mark.parametrize("kind", list(kinds()), ids=str)
def test_the_stored_shape_has_the_contracted_axis_last(kind: type | str) -> None:
    module = EXAMPLES[kind][0]()
    found = kind_of(module)
    assert found is kinds()[kind]
    for name in found.params:
        tensor = getattr(module, name)
        if tensor is None:
            continue
        made = make_site(Place(name, "", module, name), tensor)
        assert isinstance(made, Site)
        assert (made.op, made.transposed, made.bare) == (found.op, found.transposed, False)
        assert made.shape == (tuple(tensor.shape)[::-1] if found.transposed else tuple(tensor.shape))
