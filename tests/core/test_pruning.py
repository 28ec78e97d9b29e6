"""torch.nn.utils.prune on quantized layers: ``remove`` writes the masked weight by ``weight_orig.data = masked``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import pennyweight as pw
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor

METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "rows": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "global": lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.4),
}
pytestmark = pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")  # the masked weight is computed dense


def pruned(config: str, method: Callable[[nn.Module], Any], dtype: torch.dtype) -> tuple[nn.Linear, Any, torch.Tensor]:
    """The layer after ``prune.remove``, its mask, and the masked weight before."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 64).to(dtype)  # 96: groups of 64 and 128 are padded
    pw.quantize_(layer, config)
    spec = layer.weight.spec  # type: ignore[attr-defined]
    method(layer)
    mask, masked = layer.weight_mask.clone(), layer.weight.detach().clone()  # type: ignore[operator]
    x = torch.randn(3, 96, dtype=dtype)
    torch.testing.assert_close(layer(x), F.linear(x, masked, layer.bias))
    prune.remove(layer, "weight")
    assert isinstance(layer.weight, AffineQuantizedTensor)
    assert layer.weight.spec == spec
    return layer, mask, masked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("config", ["int8", "int4", "int4:32", "int3", "int2", "uint4", "nf4", "float8"])
def test_pruned_entries_stay_zero(config: str, method: Callable[[nn.Module], Any], dtype: torch.dtype) -> None:
    layer, mask, masked = pruned(config, method, dtype)
    value = layer.weight.dequantize()  # type: ignore[operator]
    assert not (value[mask == 0] != 0).any()
    assert (value[mask == 1] != 0).any()
    error = float((value - masked).float().norm() / masked.float().norm())
    assert error < (0.1 if "int4" in config else 0.005)  # its ranges are chosen anew


@pytest.mark.parametrize("config", ["int8", "int3", "int2"])
def test_entries_that_are_not_pruned_keep_their_value(config: str) -> None:
    """Choosing scales anew would shrink them: absmax / 127.5 of a block whose largest code is 127."""
    layer, _, masked = pruned(config, METHODS["l1"], torch.float32)
    assert torch.equal(layer.weight.dequantize(), masked)  # type: ignore[operator]


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (0.0, 3.0), (-3.0, 0.0), (-0.1, 5.0), (-5.0, 0.1), (0.0, 0.0)])
@pytest.mark.parametrize("name", ["tinygemm", "q4_1", "q5_1"])
def test_zeros_that_are_written_stay_zero_whatever_the_range(name: str, ends: tuple[float, float]) -> None:
    torch.manual_seed(1)
    w = AffineQuantizedTensor.from_float(torch.randn(4, 128), SPECS[name])
    value = torch.rand(4, 128) * (ends[1] - ends[0]) + ends[0]
    value[:, ::2] = 0
    value[:, 1], value[:, 3] = ends
    w.copy_(value)
    got = w.dequantize()
    assert not (got[value == 0] != 0).any()
    assert float((got - value).abs().max()) <= 0.04 * (ends[1] - ends[0]) + 0.01 * max(map(abs, ends))


@pytest.mark.parametrize(
    "mask_",
    [lambda w, m: w.mul_(m), lambda w, m: w.masked_fill_(m == 0, 0.0), lambda w, m: w.__setitem__(m == 0, 0.0)],
    ids=["mul_", "masked_fill_", "setitem"],
)
def test_masks_applied_in_place_keep_zeros(mask_: Callable[[Any, torch.Tensor], Any]) -> None:
    torch.manual_seed(2)
    w = AffineQuantizedTensor.from_float(torch.randn(8, 256, dtype=torch.bfloat16), SPECS["tinygemm"])
    mask = (torch.rand(8, 256) > 0.5).to(torch.bfloat16)
    expected = w.dequantize() * mask
    mask_(w, mask)
    got = w.dequantize()
    assert not (got[mask == 0] != 0).any()
    assert float((got - expected).norm() / expected.norm()) < 0.1


def test_a_format_that_cannot_keep_zeros_says_how_many_it_lost() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 8)
    layer.weight = nn.Parameter(AffineQuantizedTensor.from_float(layer.weight, SPECS["q4_k"]), requires_grad=False)
    prune.l1_unstructured(layer, "weight", 0.5)
    with pytest.warns(
        UserWarning, match=r"\(8, 256\) .*: \d+ of 1024 exact zeros became nonzero.* prune a float model"
    ):
        prune.remove(layer, "weight")
