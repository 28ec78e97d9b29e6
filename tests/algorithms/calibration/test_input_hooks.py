"""What products see: the inputs that a weight is multiplied by, wherever it is read."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pennyweight.algorithms.calibration.block_order import inference_mode
from pennyweight.algorithms.calibration.input_hooks import InputHooks


def watched(weights: dict[str, Tensor], run: Any, mask: Tensor | None = None) -> dict[str, list[Tensor]]:
    """Inputs by name."""
    seen: dict[str, list[Tensor]] = {name: [] for name in weights}
    with (
        torch.no_grad(),
        InputHooks({id(w): name for name, w in weights.items()}, lambda n, x: seen[n].append(x), mask),
    ):
        run()
    return seen


def test_linear_layers_and_products() -> None:
    x, layer, turned = torch.randn(2, 3, 8), nn.Linear(8, 5), Conv1D(5, 8)
    w = nn.Parameter(torch.randn(8, 5))
    runs = {
        "Linear": (layer.weight, lambda: layer(x)),
        "F.linear by names": (layer.weight, lambda: F.linear(input=x, weight=layer.weight)),
        "Conv1D": (turned.weight, lambda: turned(x)),
        "x @ w": (w, lambda: x @ w),
        "torch.matmul": (w, lambda: torch.matmul(x, w)),
        "torch.mm": (w, lambda: torch.mm(x.flatten(0, 1), w)),
        "x.matmul(w)": (w, lambda: x.matmul(w)),
    }
    for name, (weight, run) in runs.items():
        seen = watched({"w": weight}, run)["w"]
        assert len(seen) == 1, name
        assert torch.equal(seen[0], x.reshape(1, 6, 8)), name
    assert watched({"w": nn.Parameter(torch.randn(8, 5))}, lambda: layer(x)) == {"w": []}


def test_half_precision_is_seen_as_float32() -> None:
    layer, x = nn.Linear(8, 4).bfloat16(), torch.randn(3, 8).bfloat16()
    (seen,) = watched({"w": layer.weight}, lambda: layer(x))["w"]
    assert seen.dtype is torch.float32
    assert torch.equal(seen[0], x.float())


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("rank", CONVOLUTIONS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_are_linear_layers_over_patches(rank: int, groups: int) -> None:
    """The weight as a matrix times what was seen is the convolution, position by position."""
    size = (11, 9, 7)[:rank]
    for stride, padding, dilation in itertools.product((1, 2), (0, 2, "same", "valid"), (1, 2)):
        if padding == "same" and stride > 1:
            continue  # torch has no such
        layer = CONVOLUTIONS[rank](4, 8, 3, stride, padding, dilation, groups, bias=False)
        x = torch.randn(2, 4, *size)
        (seen,) = watched({"w": layer.weight}, lambda layer=layer, x=x: layer(x))["w"]
        assert seen.shape[0] == groups
        rows = layer.weight.detach().flatten(1).unflatten(0, (groups, -1))  # [groups, outputs, inputs]
        y = (seen @ rows.mT).permute(1, 0, 2).flatten(1)  # [positions, outputs]
        wanted = layer(x).detach().movedim(1, -1).flatten(0, -2)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


def test_patches_are_those_of_unfold() -> None:
    layer, x = nn.Conv2d(3, 5, (3, 2), (2, 1), (1, 0), (1, 2)), torch.randn(2, 3, 8, 9)
    (seen,) = watched({"w": layer.weight}, lambda: layer(x))["w"]
    patches = F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))  # [batch, inputs, positions]
    assert torch.equal(seen[0], patches.mT.flatten(0, 1))


def test_an_input_without_a_batch() -> None:
    layer, x = nn.Conv1d(3, 5, 3), torch.randn(3, 10)
    (seen,) = watched({"w": layer.weight}, lambda: layer(x))["w"]
    assert seen.shape == (1, 8, 9)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(batch_first: bool) -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=batch_first), torch.randn(2, 5, 8)
    weights = {"in": attention.in_proj_weight, "out": attention.out_proj.weight}
    with inference_mode(attention):
        seen = watched(weights, lambda: attention(x, x, x))
        plain = attention(x, x, x)[0]
    (given,), (mixed,) = seen["in"], seen["out"]
    assert sorted(given[0].sum(1).tolist()) == pytest.approx(sorted(x.reshape(-1, 8).sum(1).tolist()), abs=1e-5)
    out = F.linear(mixed[0], attention.out_proj.weight, attention.out_proj.bias)
    assert sorted(out.sum(1).tolist()) == pytest.approx(sorted(plain.reshape(-1, 8).sum(1).tolist()), abs=1e-4)


def test_attention_is_not_changed_by_being_watched() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    names = {n: p for n, p in encoder.named_parameters() if p.ndim == 2}
    out: list[Tensor] = []
    with inference_mode(encoder):
        seen = watched(names, lambda: out.append(encoder(x)))
        assert torch.equal(out[0], encoder(x))
    assert {name: len(xs) for name, xs in seen.items()} == dict.fromkeys(names, 1)


def test_attention_with_keys_of_another_width() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 6), torch.randn(2, 7, 4)
    weights = {n: getattr(attention, f"{n}_proj_weight") for n in "qkv"}
    with inference_mode(attention):
        seen = watched(weights, lambda: attention(q, k, v))
    assert {n: tuple(x[0].shape) for n, x in seen.items()} == {"q": (1, 10, 8), "k": (1, 14, 6), "v": (1, 14, 4)}


@pytest.mark.parametrize("product", [torch.bmm, torch.matmul, lambda x, w: x @ w, Tensor.bmm])
def test_experts_have_inputs_of_their_own(product: Any) -> None:
    w, x = nn.Parameter(torch.randn(3, 8, 5)), torch.randn(3, 4, 8)
    (seen,) = watched({"w": w}, lambda: product(x, w))["w"]
    assert torch.equal(seen, x)


def test_masked_tokens_are_left_out() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    kept = torch.cat([x[0, :2], x[1, :1]])
    for given in (x, x.transpose(0, 1), x.flatten(0, 1)):
        (seen,) = watched({"w": layer.weight}, lambda given=given: layer(given), mask)["w"]
        assert sorted(seen[0].tolist()) == sorted(kept.tolist())
    pooled = x[:, 0]  # one token of each: of another shape, taken whole
    (seen,) = watched({"w": layer.weight}, lambda: layer(pooled), mask)["w"]
    assert torch.equal(seen[0], pooled)


def test_unfolding_can_be_left_to_others() -> None:
    layer, x, seen = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 6, 6), []
    with torch.no_grad(), InputHooks({id(layer.weight): "w"}, lambda n, x: seen.append(x), unfold=False):
        layer(x)
    assert torch.equal(seen[0], x)
