"""Plain torch: state_dict and load_state_dict in all four directions, assigned or copied, strict or not; torch.save."""

import copy
import io
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import FP8_ROW, NF4_DOUBLE, TINYGEMM, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import load, save
from pennyweight.kernels.repack import prepare
from tests.io.test_native_format import assert_same

SPECS = {
    "int8": QuantSpec(INT8, (-1,)),
    "int4": QuantSpec(INT4, (32,), scale=torch.bfloat16),
    "zero point": QuantSpec(INT8, (16,), zero_point=True),
    "tinygemm": TINYGEMM,
    "fp8": FP8_ROW,
    "nested": NF4_DOUBLE,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.layer = nn.Linear(64, 32)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embed(ids)).sum() + self.head(self.embed(ids)).sum()


def float_model() -> Net:
    return Net()


def quantized_model(spec: QuantSpec, packed: bool = False) -> Net:
    model = Net()
    for layer, ops in ((model.layer, ("linear",)), (model.head, ("embedding", "linear"))):
        w = QT.from_float(layer.weight, spec)
        layer.weight = nn.Parameter(prepare(w, ops) if packed else w, requires_grad=False)
    model.embed.weight = model.head.weight
    return model


def value(w: Tensor) -> Tensor:
    return w.detach().dequantize() if isinstance(w, QT) else w.detach()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
class TestFourDirections:
    def test_quantized_into_quantized(self, spec: QuantSpec, assign: bool, packed: bool) -> None:
        source, target = quantized_model(spec, packed), quantized_model(spec)
        weight = target.layer.weight
        assert str(target.load_state_dict(source.state_dict(), assign=assign)) == "<All keys matched successfully>"
        for name, tensor in source.state_dict().items():
            assert_same(tensor, target.state_dict()[name])
        assert (target.layer.weight is weight) == (not assign)
        assert isinstance(target.layer.weight, nn.Parameter)
        assert assign or target.head.weight is target.embed.weight

    def test_float_into_quantized(self, spec: QuantSpec, assign: bool, packed: bool) -> None:
        """Copied: the weight is quantized again, in its own storage. Assigned: the model becomes float there."""
        source, target = float_model(), quantized_model(spec, packed)
        codes = target.layer.weight.parts.codes.data_ptr()
        target.load_state_dict(source.state_dict(), assign=assign)
        if assign:
            assert not isinstance(target.layer.weight, QT)
            assert torch.equal(target.layer.weight, source.layer.weight)
            return
        assert target.layer.weight.parts.codes.data_ptr() == codes
        expected = QT.from_float(source.layer.weight, spec)
        assert torch.equal(value(target.layer.weight), expected.dequantize())
        assert torch.equal(target.layer.bias, source.layer.bias)
        assert target.head.weight is target.embed.weight

    def test_quantized_into_float(self, spec: QuantSpec, assign: bool, packed: bool) -> None:
        """Copied: the float weight takes the values. Assigned: the model becomes quantized there."""
        source, target = quantized_model(spec, packed), float_model()
        with nullcontext() if assign else pytest.warns(UserWarning, match="into float parameters"):
            target.load_state_dict(source.state_dict(), assign=assign)
        assert isinstance(target.layer.weight, QT) == assign
        assert isinstance(target.layer.weight, nn.Parameter)
        assert torch.equal(value(target.layer.weight), value(source.layer.weight))
        assert torch.equal(value(target.head.weight), value(source.head.weight))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_missing_and_unexpected(assign: bool) -> None:
    source, target = quantized_model(SPECS["int4"]), quantized_model(SPECS["int4"])
    state = OrderedDict(source.state_dict())
    del state["layer.weight"]
    state["more"] = torch.zeros(1)
    before = copy.deepcopy(target.layer.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(state, assign=assign)
    result = target.load_state_dict(state, strict=False, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == (["layer.weight"], ["more"])
    assert_same(target.layer.weight.data, before.data)
    assert_same(target.head.weight.data, source.head.weight.data)


@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_a_wrong_shape_is_refused(kind: str) -> None:
    target = quantized_model(SPECS["int8"])
    before = copy.deepcopy(target.layer.weight)
    wrong = torch.randn(32, 65)
    state = target.state_dict() | {"layer.weight": wrong if kind == "float" else QT.from_float(wrong, SPECS["int8"])}
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        target.load_state_dict(state)
    assert_same(target.layer.weight.data, before.data)


def test_another_spec_is_requantized_on_copy_and_taken_on_assign() -> None:
    source, target = quantized_model(SPECS["int8"]), quantized_model(SPECS["int4"])
    with pytest.warns(UserWarning, match="assign=True"):
        target.load_state_dict(source.state_dict())
    expected = QT.from_float(source.layer.weight.dequantize(), SPECS["int4"])
    assert torch.equal(value(target.layer.weight), expected.dequantize())
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same(target.layer.weight.data, source.layer.weight.data)


def test_nan_in_a_float_checkpoint_is_refused() -> None:
    target = quantized_model(SPECS["int8"])
    state = float_model().state_dict()
    state["layer.weight"][0, 0] = float("nan")
    with pytest.raises((RuntimeError, ValueError), match="NaN or inf"):
        target.load_state_dict(state)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_torch_save_of_whole_state_dicts(spec: QuantSpec, packed: bool) -> None:
    source = quantized_model(spec, packed)
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    for name, tensor in source.state_dict().items():
        assert_same(tensor, state[name])
    target = quantized_model(spec, packed)
    target.load_state_dict(state)
    for name, tensor in source.state_dict().items():
        assert_same(tensor, target.state_dict()[name])
    assert target.head.weight is target.embed.weight
    assert buffer.tell() <= sum(t.nbytes for t in source.state_dict().values()) + 40_000


def test_torch_save_keeps_ties() -> None:
    buffer = io.BytesIO()
    torch.save(quantized_model(SPECS["int8"]).state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state["head.weight"].codes.data_ptr() == state["embed.weight"].codes.data_ptr()


def test_what_pw_load_gives_goes_into_load_state_dict(tmp_path: Path) -> None:
    source = quantized_model(SPECS["tinygemm"], packed=True)
    save(source, tmp_path)
    for assign in (False, True):
        for target in (quantized_model(SPECS["tinygemm"], packed=True), float_model()):
            copied = not assign and not isinstance(target.layer.weight, QT)
            with pytest.warns(UserWarning, match="into float") if copied else nullcontext():
                target.load_state_dict(load(tmp_path), assign=assign)
            assert torch.equal(value(target.layer.weight), value(source.layer.weight))
            target(torch.tensor([1, 2]))


def test_meta_model_by_assign() -> None:
    source = quantized_model(SPECS["int4"])
    with torch.device("meta"):
        target = Net()
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same(target.layer.weight.data, source.layer.weight.data)
    assert target.layer.bias.device.type == "cpu"
