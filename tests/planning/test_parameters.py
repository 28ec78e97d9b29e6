"""Kinds of modules and parameters: each is quantized where it is asked for, and still computes what it did."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning.configs import ContractedAxis
from pennyweight.planning.parameters import SiteKind, kinds, site

INT8, INT4 = pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=32)
DYNAMIC = pw.Int8DynamicActivationInt8WeightConfig()


def is_quantized(t: Any) -> bool:
    return isinstance(t, AffineQuantizedTensor)


def anything(module: nn.Module, fqn: str) -> bool:
    return True


class MyLinear(nn.Linear):
    """A subclass, as many libraries have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC])
def test_a_leaf_linear_as_the_root(config: pw.AOBaseConfig) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(9, 64)
    exact = layer(x).detach()
    report = pw.quantize_(layer, config)
    assert [r.name for r in report.quantized] == ["weight"]
    assert sqnr(exact, layer(x).detach()) > 18


def test_subclasses_of_linear() -> None:
    layer, x = MyLinear(64, 32), torch.randn(9, 64)
    exact = layer(x).detach()
    pw.quantize_(layer, INT8)
    assert type(layer) is MyLinear
    assert sqnr(exact, layer(x).detach()) > 35


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC, pw.NF4WeightOnlyConfig()])
def test_embeddings_by_filter(config: pw.AOBaseConfig) -> None:
    table = nn.Embedding(50, 64)
    model, index = nn.Sequential(table), torch.tensor([[3, 49], [0, 3]])
    exact = model(index).detach()
    pw.quantize_(model, config, lambda m, fqn: isinstance(m, nn.Embedding))
    assert is_quantized(table.weight)
    assert table.weight.act is None  # an index is no activation
    assert torch.equal(model(index), table.weight.dequantize()[index])
    assert sqnr(exact, model(index)) > 18


def test_an_embedding_that_writes_to_its_table_is_left_alone() -> None:
    with pytest.raises(pw.PlanError, match="max_norm"):
        pw.quantize_(nn.Embedding(50, 64, max_norm=1.0), INT8, anything)


CONVS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv1d(16, 24, 3), (2, 16, 20)),
    (lambda: nn.Conv1d(64, 8, 1), (2, 64, 5)),
    (lambda: nn.Conv2d(16, 24, 3, padding=1), (2, 16, 8, 8)),
    (lambda: nn.Conv2d(32, 64, 1, bias=False), (2, 32, 8, 8)),
    (lambda: nn.Conv2d(16, 32, (3, 5), stride=2, groups=4), (2, 16, 16, 16)),
    (lambda: nn.Conv2d(16, 16, 3, groups=16), (2, 16, 8, 8)),
    (lambda: nn.Conv2d(7, 5, 3, dilation=2, padding_mode="reflect", padding=2), (1, 7, 11, 11)),
    (lambda: nn.Conv3d(8, 16, 3), (1, 8, 5, 6, 7)),
]


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC])
@pytest.mark.parametrize(("make", "shape"), CONVS)
def test_convolutions_by_filter(make: Callable[[], nn.Module], shape: tuple[int, ...], config: pw.AOBaseConfig) -> None:
    conv, x = make(), torch.randn(shape, requires_grad=True)
    exact = conv(x).detach()
    pw.quantize_(conv, config, anything)
    assert is_quantized(conv.weight)
    got = conv(x)
    assert got.shape == exact.shape
    assert sqnr(exact, got.detach()) > 18
    plain = make()
    plain.load_state_dict({k: v.dequantize() if is_quantized(v) else v for k, v in conv.state_dict().items()})
    if config is not DYNAMIC:
        torch.testing.assert_close(got, plain(x))
    got.sum().backward()
    grad, x.grad = x.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(grad, x.grad)
    assert conv(x[0].detach()).shape == exact.shape[1:]


def test_a_model_of_convolutions_alone_names_the_remedy() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises(pw.PlanError, match=r"Conv2d: not selected by default.*filter_fn"):
        pw.quantize_(model, INT8)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 32, "vdim": 16}])
def test_multihead_attention(sizes: dict[str, int], train: bool) -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=True, **sizes).train(train)
    q = torch.randn(2, 5, 64)
    k, v = torch.randn(2, 6, sizes.get("kdim", 64)), torch.randn(2, 6, sizes.get("vdim", 64))
    exact = attention(q, k, v)[0].detach()
    report = pw.quantize_(attention, INT8)
    names = {"q_proj_weight", "k_proj_weight", "v_proj_weight"} if sizes else {"in_proj_weight"}
    assert {r.name for r in report.quantized} == names | {"out_proj.weight"}
    with torch.set_grad_enabled(train):
        assert sqnr(exact, attention(q, k, v)[0].detach()) > 30
    if not sizes:
        exact = attention(q, q, q)[0].detach()
        with torch.inference_mode():  # where torch would take its fused path
            torch.testing.assert_close(attention(q, q, q)[0], exact)


def test_a_transformer_encoder_layer_in_eval_mode() -> None:
    layer, x = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval(), torch.randn(2, 5, 64)
    exact = layer(x).detach()
    assert len(pw.quantize_(layer, INT8).quantized) == 4
    with torch.no_grad():
        assert sqnr(exact, layer(x)) > 30


@pytest.fixture
def hf_conv1d() -> type[nn.Module]:
    """transformers' Conv1D, or where it is not installed a stand-in under the same qualified name."""
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError:

        class Conv1D(nn.Module):  # type: ignore[no-redef]
            def __init__(self, nf: int, nx: int) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
                self.bias = nn.Parameter(torch.zeros(nf))

            def forward(self, x: Tensor) -> Tensor:
                y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
                return y.view(*x.shape[:-1], -1)

        Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    return Conv1D


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC])
def test_conv1d_of_transformers(hf_conv1d: type[nn.Module], config: pw.AOBaseConfig) -> None:
    layer, x = hf_conv1d(48, 64), torch.randn(2, 7, 64)
    exact, shape = layer(x).detach(), layer.weight.shape
    report = pw.quantize_(nn.Sequential(layer), config)
    assert report.quantized[0].shape == shape
    assert layer.weight.shape == shape == (64, 48)
    assert layer.weight.stored_shape == (48, 64)  # contracted axis last
    pw.reset_fallbacks()
    with pw.kernels.strict():
        got = layer(x).detach()
    assert "mm/dequantize" not in pw.fallbacks()
    assert sqnr(exact, got) > 18
    pw.dequantize_(layer)
    assert layer.weight.is_contiguous()
    assert layer.weight.shape == shape


class Experts(nn.Module):
    """Experts as bare parameters [E, N, K] and [E, K, N], as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 48, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 48, 64) * 0.1)
        self.gate = nn.Parameter(torch.randn(4, 64) * 0.1)
        self.bias = nn.Parameter(torch.zeros(4, 64))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.gate).mean((1, 2))
        hidden = torch.bmm(x, self.up.transpose(1, 2))
        return torch.bmm(hidden, self.down) * scores[:, None, None]


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC])
def test_bare_expert_parameters_by_name(config: pw.AOBaseConfig) -> None:
    model, x = nn.Sequential(Experts()), torch.randn(4, 6, 64)
    exact = model(x).detach()
    by_name = {"0.up": config, "re:.*down": ContractedAxis(config), "*.gate": config}
    report = pw.quantize_(model, pw.FqnToConfig(by_name))
    assert [r.name for r in report.quantized] == ["0.up", "0.down", "0.gate"]
    experts = model[0]
    assert experts.up.stored_shape == (4, 48, 64)
    assert experts.down.shape == (4, 48, 64)
    assert experts.down.stored_shape == (4, 64, 48)
    with pw.kernels.strict():
        assert sqnr(exact, model(x).detach()) > 15
    one = experts.up[2]
    assert is_quantized(one)
    assert torch.equal(one.dequantize(), experts.up.dequantize()[2])
    assert torch.equal(F.linear(x[0], one), F.linear(x[0], one.clone()))
    again = pw.quantize_(model, pw.FqnToConfig(by_name))
    assert all("already quantized" in r.note for r in again.quantized)


def test_along_the_wrong_axis_scales_would_not_follow_the_outputs() -> None:
    """[E, K, N] used as bmm(x, w): with ContractedAxis each scale belongs to one output."""
    model = Experts()
    with torch.no_grad():
        model.down[:, :, 5] *= 100  # one large output
    floats = model.down.detach().clone()
    pw.quantize_(model, pw.FqnToConfig({"down": ContractedAxis(INT8)}))
    others = [i for i in range(64) if i != 5]
    assert sqnr(floats[:, :, others], model.down.dequantize()[:, :, others]) > 40


def test_contracted_axis_does_not_contradict_a_layer() -> None:
    with pytest.raises(pw.PlanError, match=r"weight: ContractedAxis\(-2\): Linear is contracted along the other axis"):
        pw.quantize_(nn.Linear(8, 8), ContractedAxis(INT8))


def test_a_pattern_for_layers_does_not_reach_bare_parameters_inside_them() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(1, 5, 32))
            self.proj = nn.Linear(32, 32)

    model = nn.ModuleDict({"layers": nn.ModuleList([Encoder()])})
    for key, names in (
        ("layers.*", ["layers.0.proj.weight"]),
        (r"re:layers\..*", ["layers.0.proj.weight"]),
        ("layers.0.*", ["layers.0.position", "layers.0.proj.weight"]),
        ("*.position", ["layers.0.position"]),
    ):
        rows = pw.plan(model, pw.FqnToConfig({key: INT8})).active
        assert [r.name for r in rows] == names


def test_a_plain_tensor_instead_of_a_parameter() -> None:
    layer, x = nn.Linear(32, 16), torch.randn(3, 32)
    weight = layer.weight.data
    del layer.weight
    layer.weight = weight
    report = pw.quantize_(nn.Sequential(layer), INT8)
    assert [r.name for r in report.quantized] == ["0.weight"]
    assert is_quantized(layer.weight)
    assert not isinstance(layer.weight, nn.Parameter)
    assert "weight" not in layer._parameters
    assert layer(x).isfinite().all()
    pw.dequantize_(layer)
    assert type(layer.weight) is Tensor


COMPUTED = {
    nn.utils.weight_norm: "remove_weight_norm(layer, 'weight')",
    nn.utils.spectral_norm: "remove_spectral_norm(layer, 'weight')",
    lambda layer: prune.l1_unstructured(layer, "weight", 0.5): "prune.remove(layer, 'weight')",
    parametrizations.weight_norm: "parametrize.remove_parametrizations(layer, 'weight')",
    parametrizations.orthogonal: "parametrize.remove_parametrizations(layer, 'weight')",
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_weights_that_a_hook_recomputes_are_refused_with_the_reason() -> None:
    """Quantizing what weight_norm writes at each forward would have no effect at all."""
    for wrap, remedy in COMPUTED.items():
        said = re.escape(f"before each forward; call torch.nn.utils.{remedy} first")
        with pytest.raises(pw.PlanError, match=said):
            pw.quantize_(wrap(nn.Linear(8, 8)), INT8)
        for key in ("0", "0.weight", "*.weight"):  # the weight is no parameter, but this is its name
            said = re.escape(f"'{key}': 0.weight is computed before each forward; call torch.nn.utils.{remedy}")
            with pytest.raises(pw.PlanError, match=said):
                pw.quantize_(nn.Sequential(wrap(nn.Linear(8, 8))), pw.FqnToConfig({key: INT8}))
        mixed = nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 8))
        assert [r.name for r in pw.quantize_(mixed, pw.FqnToConfig({"*": INT8})).quantized] == ["1.weight"]
        exec(f"torch.nn.utils.{remedy}", {"torch": torch, "layer": mixed[0]})
        assert [r.name for r in pw.quantize_(mixed, INT8).quantized] == ["0.weight", "1.weight"]


def test_an_own_module_type_in_one_line() -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(16, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.matrix)

    assert Projection not in kinds()
    site(Projection, SiteKind(("matrix",), "linear"))
    try:
        model = nn.Sequential(Projection())
        assert [r.name for r in pw.quantize_(model, INT8).quantized] == ["0.matrix"]
        assert model(torch.randn(2, 32)).shape == (2, 16)
    finally:
        from pennyweight.planning import parameters

        del parameters._KINDS[Projection]


def test_integer_parameters_are_left_alone() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(pw.PlanError, match=r"dtype int32 is not one of float32"):
        pw.quantize_(layer, INT8)
    layer.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(pw.PlanError, match=r"dtype float8_e4m3fn is not one of float32"):
        pw.quantize_(layer, INT8)


def test_a_tensor_of_another_library_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    report = pw.quantize_(model, INT8)
    assert report.rows[0].note == "TwoTensor is a tensor subclass of another library"
    assert [r.name for r in report.quantized] == ["1.weight"]


@pytest.mark.parametrize("config", [INT8, INT4, DYNAMIC])
def test_strided_and_double_weights(config: pw.AOBaseConfig) -> None:
    layer, x = nn.Linear(64, 32, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float64).t()[:32])
    exact = layer(x).detach()
    pw.quantize_(layer, config)
    got = layer(x).detach()
    assert got.dtype == torch.float64
    assert sqnr(exact, got) > 18
