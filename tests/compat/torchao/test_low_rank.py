"""torchao.prototype.dora, galore and paretoq: their formulas, gradients and training."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pennyweight.compat.torchao.prototype.dora import dora_layer
from pennyweight.compat.torchao.prototype.galore import utils as galore_utils
from pennyweight.compat.torchao.prototype.galore.optim import galore_torch
from pennyweight.compat.torchao.prototype.paretoq.models import utils_quant
from pennyweight.compat.torchao.quantization import Int8WeightOnlyConfig, quantize_

# -- DoRA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
def test_dora_is_its_formula(quantized: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(12, 8, bias=False)
    if quantized:
        quantize_(base, Int8WeightOnlyConfig())
    w = base.weight.dequantize() if quantized else base.weight.detach()
    layer = dora_layer.DoRALinear(base, 4)
    x = torch.randn(3, 5, 12)
    torch.testing.assert_close(layer(x), F.linear(x, w))  # the update begins as zero
    nn.init.normal_(layer.dora_layer.lora_B.weight)
    a, b, m = layer.dora_layer.lora_A.weight, layer.dora_layer.lora_B.weight, layer.magnitude_vec
    whole = w + b @ a
    want = F.linear(x, whole) * (m / whole.norm(dim=1))
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.forward_fused(x[0]), want[0])
    torch.testing.assert_close(layer.forward_instrumented(x, annotation_ctx=lambda name: nullcontext()), want)
    grads = torch.autograd.grad(layer(x).sum(), (a, b, m))
    for got, other in zip(grads, torch.autograd.grad(want.sum(), (a, b, m)), strict=True):
        torch.testing.assert_close(got, other)
    assert abs(float(a.detach().std()) - 0.5) < 0.2
    with pytest.raises(AssertionError, match="Expected 2D or 3D"):
        layer(x[0, 0])


def test_dora_over_a_layer_that_dequantizes_itself() -> None:
    class Own(nn.Module):
        compute_dtype = torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-5, 5, (8, 12)).float(), requires_grad=False)

        def dequantize(self) -> torch.Tensor:
            return self.weight / 10

    layer, x = dora_layer.HQQDoRALinear(Own(), 2), torch.randn(4, 12)
    torch.testing.assert_close(layer(x), F.linear(x, layer.base_layer.weight / 10))


# -- GaLore ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
def test_projections(shape: tuple[int, int], kind: str) -> None:
    """A gradient of rank two survives a projection to rank two; the projected one is smaller."""
    torch.manual_seed(0)
    grad = torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
    projector = galore_torch.GaLoreProjector(2, scale=0.5, proj_type=kind)
    low = projector.project(grad, 0)
    left = {"std": shape[0] < shape[1], "reverse_std": shape[0] >= shape[1]}.get(kind, kind == "left")
    assert tuple(low.shape) == ((2, 2) if kind == "full" else (2, shape[1]) if left else (shape[0], 2))
    torch.testing.assert_close(projector.project_back(low), 0.5 * grad, rtol=1e-4, atol=1e-5)
    kept = projector.ortho_matrix
    projector.project(torch.randn(shape), 1)
    assert projector.ortho_matrix is kept
    projector.project(torch.randn(shape), 200)
    assert projector.ortho_matrix is not kept


def test_projectors_by_hand() -> None:
    grad = torch.randn(6, 4)
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    both = galore_utils.get_orthogonal_matrix(grad.bfloat16().float(), 3, "full")
    assert [tuple(m.shape) for m in both] == [(6, 3), (3, 4)]
    assert torch.equal(galore_utils.get_orthogonal_matrix(grad, 2, "right"), vh[:2])
    assert torch.equal(galore_utils.get_orthogonal_matrix(grad, 2, "left"), u[:, :2])
    assert galore_utils.get_orthogonal_matrix(grad.bfloat16(), 2, "left").dtype is torch.bfloat16
    projector = galore_utils.TestGaLoreProjector(2)
    with pytest.raises(ValueError, match="update_orthogonal_matrix"):
        projector.project(grad)
    projector.update_orthogonal_matrix(grad)
    assert torch.equal(projector.project(grad), grad @ vh[:2].t())
    for make in (
        lambda: galore_utils.get_orthogonal_matrix(grad, 2, "up"),
        lambda: galore_torch.GaLoreProjector(2, proj_type="up"),
        lambda: galore_utils.TestGaLoreProjector(proj_type="full"),
    ):
        with pytest.raises(ValueError, match=r"left, right|Only std"):
            make()
    copies = galore_utils.make_copy(nn.Parameter(grad))
    assert torch.equal(copies[0], grad)
    assert not copies[0].requires_grad


def test_galore_adam() -> None:
    torch.manual_seed(0)
    plain, other = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
    other.data.copy_(plain.data)
    mine = galore_torch.AdamW([plain], lr=0.1, eps=0, weight_decay=0)
    torchs = torch.optim.AdamW([other], lr=0.1, eps=0, weight_decay=0)
    for _ in range(3):
        for p, optimizer in ((plain, mine), (other, torchs)):
            optimizer.zero_grad()
            (p**3).sum().backward()
            optimizer.step()
    torch.testing.assert_close(plain, other)

    w = nn.Parameter(torch.randn(12, 8))
    goal = torch.randn(12, 8)
    group: dict[str, Any] = {"params": [w], "rank": 3, "update_proj_gap": 10, "scale": 1.0, "proj_type": "std"}
    optimizer = galore_torch.AdamW([group], lr=0.05, weight_decay=0.01)
    first = w.detach().clone()
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w - goal).square().sum()
        loss.backward()
        return loss

    for _ in range(200):
        losses.append(optimizer.step(closure).item())
        if len(losses) == 1:
            grad = 2 * (first - goal)
            v = torch.linalg.svd(grad, full_matrices=False)[2][:3]
            low = grad @ v.t()
            update = (0.1 * low) / ((0.001 * low * low).sqrt() + 1e-6) @ v
            step = 0.05 * math.sqrt(0.001) / 0.1
            torch.testing.assert_close(w.detach(), (first - step * update) * (1 - 0.05 * 0.01), rtol=1e-3, atol=1e-4)
    assert losses[-1] < 0.2 * losses[0]
    state = optimizer.state[w]
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (12, 3)
    twin = nn.Parameter(w.detach().clone())
    again = galore_torch.AdamW([{**group, "params": [twin]}], lr=0.05, weight_decay=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((w, optimizer), (twin, again)):
        p.grad = torch.ones_like(p)
        o.step()
    assert torch.equal(twin, w)
    vector = nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    with pytest.raises(ValueError, match="needs matrices"):
        galore_torch.AdamW([{"params": [vector], "rank": 2}]).step()
    with pytest.raises(ValueError, match="betas in"):
        galore_torch.AdamW([vector], betas=(1.0, 0.9))


# -- ParetoQ -----------------------------------------------------------------------------------------------------------


def _values(how: Any, w: torch.Tensor, alpha: torch.Tensor, bits: int) -> torch.Tensor:
    """The formulas, with steps that autograd passes straight through."""
    steps = w / alpha
    if bits == 1:
        return w.sign() * alpha
    if how is utils_quant.LsqBinaryTernaryExtension:
        low, high = (-1, 1) if bits == 0 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        clamped = steps.clamp(low, high)
        return (clamped + (clamped.round() - clamped).detach()) * alpha
    levels, shift = (1.5, 0.0) if bits == 0 else (2 ** (bits - 1), 0.5)
    most = (levels - shift) / levels
    rounded = ((steps.clamp(-0.99, 0.99) * levels - shift).round() + shift) / levels
    inside = (steps.abs() <= 0.99).detach()
    outer = steps.sign().detach() * most  # of which three values have the last at 2/3, though the gradient is that of 1
    outer = outer * alpha + ((rounded - outer) * alpha).detach()
    return torch.where(inside, (steps + (rounded - steps).detach()) * alpha, outer)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["LsqBinaryTernaryExtension", "StretchedElasticQuant"])
def test_values_and_gradients_are_the_formulas(name: str, bits: int, layerwise: bool) -> None:
    torch.manual_seed(0)
    how = getattr(utils_quant, name)
    w = torch.randn(5, 16, requires_grad=True)
    alpha = (torch.rand(1 if layerwise else 5, *(() if layerwise else (1,))) + 0.3).requires_grad_()
    weights = torch.randn(5, 16)
    got, want = how.apply(w, alpha, bits, layerwise), _values(how, w, alpha, bits)
    torch.testing.assert_close(got, want)
    dw, da = torch.autograd.grad((got * weights).sum(), (w, alpha))
    ew, ea = torch.autograd.grad((want * weights).sum(), (w, alpha), allow_unused=True)
    scale = 1 / math.sqrt(w.numel() * max(1, 2 ** (bits - 1) - 1))
    torch.testing.assert_close(da, ea * scale)
    if bits == 1:  # straight through inside the range, though the value is a sign
        limit = 0.99 if name == "StretchedElasticQuant" else 1
        assert torch.equal(dw, weights * ((w / alpha).abs() <= limit))
    else:
        torch.testing.assert_close(dw, ew)
    assert torch.equal(how.apply(w, alpha, 16, layerwise), w)


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 16])
def test_a_quantized_layer_trains(bits: int) -> None:
    torch.manual_seed(0)
    layer = utils_quant.QuantizeLinear(16, 8, w_bits=bits, bias=bits == 2)
    assert (layer.bias is not None) == (bits == 2)
    if bits == 16:
        assert not hasattr(layer, "weight_clip_val")
    else:
        size = layer.weight.detach().abs()
        begin = {1: size.mean(1, keepdim=True), 0: size.amax(1, keepdim=True), 2: size.amax(1, keepdim=True)}
        steps = 2 ** (bits - 1) - 1 if bits > 2 else 1
        torch.testing.assert_close(layer.weight_clip_val.detach(), begin.get(bits, size.amax(1, keepdim=True) / steps))
    x = torch.randn(64, 16)
    y = F.linear(x, torch.randn(8, 16).sign())
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    if bits < 16:
        how = "StretchedElasticQuant" if bits in (0, 2) else "LsqBinaryTernaryExtension"
        w = getattr(utils_quant, how).apply(layer.weight, layer.weight_clip_val, bits, False)
        assert len(w[0].unique()) <= (3 if bits == 0 else 2**bits)
    with pytest.raises(ValueError, match="w_bits must be 0 to 4"):
        utils_quant.QuantizeLinear(4, 4, w_bits=8)
