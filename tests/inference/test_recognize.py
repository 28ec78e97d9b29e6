"""Which blocks are recognized, with which steps, and the reasons for the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.inference import FusedBlock
from pennyweight.inference.query_graph import activation, norm_form
from pennyweight.inference.trace_block import record
from pennyweight.kernels.block import ACTIVATIONS, LinearStep, NormStep
from tests.inference.fuse_models import FAMILIES, blocks_of, model_of

WIDTH, HEADS = 32, 4


class Attend(nn.Module):
    """Attention with its products in a list of forms."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        y = self.qkv(x)
        if self.form == "interleaved":  # [heads, 3, channels] instead of [3, heads, channels]
            q, k, v = y.view(b, s, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = y.view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.form == "tanh":
            q = q.tanh()
        if self.form == "written":
            scores = q @ k.transpose(-1, -2) * 0.4
            scores = scores if mask is None else scores + mask
            y = F.softmax(scores, -1) @ v
        elif self.form == "relu scores":
            y = F.relu(q @ k.transpose(-1, -2)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """A block with variations."""

    def __init__(self, form: str = "", act: Callable[[Tensor], Tensor] = F.gelu, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.attend, self.form, self.act = Attend(form), form, act
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.gate = nn.Linear(WIDTH, 48) if form == "gated" else None
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x), mask))
        if self.form == "halved":
            x = x * 0.5
        h = self.norm2(x)
        y = self.act(self.up(h)) if self.gate is None else self.up(h) * self.act(self.gate(h))
        y = self.down(y)
        if self.form == "scaled branch":
            return x + y * 0.7
        if self.form == "two outputs":
            return x + y, y
        return x + y


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def build(*args: Any, skip: Any = (), **kwargs: Any) -> Model:
    torch.manual_seed(0)
    model = Model(lambda: Block(*args, **kwargs)).eval()
    pw.quantize_(model, "int8", skip=skip)
    return model


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("form", ["", "written", "gated"])
def test_a_block_of_ones_own(form: str, norm: Any, act: str) -> None:
    model = build(form, ACTIVATIONS[act], norm)
    expected = model(X)
    assert set(blocks_of(pw.fuse_(model, X)).values()) == {""}
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
        mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.rand(2, 1, 5, 5) < 0.3, -10.0)
        y = model.blocks[0](X, mask=mask)
        pw.inference.thaw_(model)
        torch.testing.assert_close(y, model.blocks[0](X, mask=mask), rtol=1e-4, atol=1e-5)


REASONS = {
    "interleaved": "not columns of a linear layer",
    "tanh": "not columns of a linear layer",
    "relu scores": "transpose",
    "halved": "mul",
    "scaled branch": "output of mul",
    "two outputs": "more than its hidden states",
}


@pytest.mark.parametrize("form", REASONS)
def test_the_reasons_for_a_refusal(form: str) -> None:
    model = build(form)
    expected = model(X)
    reasons = blocks_of(pw.fuse_(model, X))
    assert len(reasons) == 2
    for reason in reasons.values():
        assert REASONS[form] in reason, reason
    assert not any(isinstance(module, FusedBlock) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def test_other_reasons() -> None:
    def only(report: pw.Report) -> str:
        (reason,) = set(blocks_of(report).values())
        return reason

    assert "up is not quantized" in only(pw.fuse_(build(skip=["up"]), X))
    assert "no step" in only(pw.fuse_(build(act=torch.sin), X))
    report = pw.fuse_(build())
    assert "example" in only(report)
    assert "example=" in report.notes[0]
    assert "no transformer blocks" in pw.fuse_(nn.Sequential(nn.Linear(4, 4))).notes[0]


class Wrong(Block):
    """Its forward does something that no single call shows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y + 1 if x.shape[0] == 3 else y


def test_a_block_that_differs_for_other_shapes_is_refused() -> None:
    torch.manual_seed(0)
    model = Model(Wrong).eval()
    pw.quantize_(model, "int8")
    (reason,) = set(blocks_of(pw.fuse_(model, X)).values())
    assert "differs by" in reason
    assert "batch 3" in reason


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_is_computed_twice(family: str) -> None:
    model = model_of(family)
    pw.fuse_(model)
    for module in model.modules():
        if isinstance(module, FusedBlock):
            products = module.description.products()
            assert len(products) == len(set(products))
            inner = [m for m in module.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
            count = len(inner) - 2 * (module.description.cross is not None)  # keys and values of cross-attention
            assert len(products) in (count, count + 1)  # in_proj of nn.MultiheadAttention has no module


@pytest.mark.parametrize(
    ("family", "linear", "norm"), [("bert", 4, 1), ("llama", 4, 0), ("gemma2", 4, 2), ("phi", 4, 0)]
)
def test_the_number_of_steps(family: str, linear: int, norm: int) -> None:
    model = model_of(family)
    pw.fuse_(model)
    block = next(m for m in model.modules() if isinstance(m, FusedBlock))
    steps = block.description.steps
    assert sum(isinstance(s, LinearStep) for s in steps) == linear
    assert sum(isinstance(s, NormStep) for s in steps) == norm


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 3e-3])
@pytest.mark.parametrize("kind", ["layer", "rms", "shifted"])
def test_formulas_of_norms(kind: str, eps: float) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.epsilon, self.other = nn.Parameter(torch.randn(8)), eps, 1e-4

        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * (1 + self.weight)

    made = {"layer": lambda: nn.LayerNorm(8, eps), "rms": lambda: nn.RMSNorm(8, eps), "shifted": Shifted}[kind]()
    graph = record(nn.Sequential(made), {"input": torch.randn(3, 8)})
    form = norm_form(graph.ops[0])
    assert form is not None
    assert (form.kind, form.eps, form.offset) == ("layer" if kind == "layer" else "rms", eps, float(kind == "shifted"))
    assert form.weight == "0.weight"
    assert norm_form(record(nn.Sequential(nn.Softmax(-1)), {"input": torch.randn(3, 8)}).ops[0]) is None


def test_formulas_of_activations() -> None:
    x = torch.randn(9, 50) * 3
    for name, module in (("relu", nn.ReLU()), ("gelu", nn.GELU()), ("gelu_tanh", nn.GELU("tanh")), ("silu", nn.SiLU())):
        assert activation(x, module(x)) == name
    for other in (nn.Tanh(), nn.LeakyReLU(), nn.Softmax(-1), nn.Hardswish()):
        assert activation(x, other(x)) is None
