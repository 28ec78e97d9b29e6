"""Linear layers that rotate their input at run time, for inputs whose rotation cannot be folded into other layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn

from .hadamard import hadamard, hadamard_factors

MARK = "input_rotation"


class RotatedLinear(nn.Linear):
    """y = (x H 2^-k) (W H 2^k / K)^T + b, with H = L x R of entries +1 and -1, so that H H^T = K I.

    Made by :func:`rotate_inputs_`; ``weight`` is the factor with W. H depends on K alone. H's entries and 2^-k are
    exact in every float dtype; the sums round. Costs K (a + b) multiplications per token, a b = K, next to the N K of
    the layer. ``input_rotation`` [a, b] is in the state dict so that no plain layer loads this weight by mistake.
    """

    _left: Tensor
    _right: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """input [.., K] -> [.., N]."""
        left, right = self._left, self._right
        if left.device != input.device or left.dtype != input.dtype:
            a, b = hadamard_factors(self.in_features)
            left, right = (signed_hadamard(n).to(input.device, input.dtype) for n in (a, b))
            self._left, self._right = left, right
        return nn.functional.linear(
            rotate_rows(input * power_of_two_norm(self.in_features), left, right), self.weight, self.bias
        )


@lru_cache(maxsize=64)
def signed_hadamard(n: int) -> Tensor:
    """A Hadamard matrix whose rows have random signs, float32 [n, n] of +1 and -1; deterministic in n. Without the
    signs the mean of all inputs would concentrate in one channel."""
    h = hadamard(n)
    assert h is not None
    signs = (
        torch.randint(0, 2, (n, 1), generator=torch.Generator().manual_seed(n), dtype=torch.int64, device="cpu") * 2 - 1
    )
    return (signs * h).float()


def rotate_rows(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x H for x [.., a b], H = left x right."""
    return torch.matmul(left.t(), x.unflatten(-1, (left.shape[0], -1)) @ right).flatten(-2)


def power_of_two_norm(width: int) -> float:
    """The power of two nearest to 1 / sqrt(width)."""
    return 2.0 ** -round(width.bit_length() / 2 - 0.5)


@torch.no_grad()
def rotate_inputs_(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Convert nn.Linear layers (names of modules) in place to :class:`RotatedLinear`, without changing the function.

    To load a checkpoint of such a model, convert the new model first. Returns notes by parameter name: what was done,
    or why not. Modules other than nn.Linear, tied weights, and sizes without a Hadamard matrix are not changed.
    """
    notes = {}
    uses: dict[int, int] = {}
    for _, module in model.named_modules():
        for p in module._parameters.values():
            uses[id(p)] = uses.get(id(p), 0) + 1
    for name in names:
        module = model.get_submodule(name)
        key = f"{name}.weight" if name else "weight"
        why = _unfit(module, uses)
        notes[key] = f"input not rotated: {why}" if why else "input rotated at run time"
        if why:
            continue
        assert isinstance(module, nn.Linear)
        w, k = module.weight, module.in_features
        left, right = (signed_hadamard(n) for n in hadamard_factors(k))
        if not w.is_meta:
            exact = rotate_rows(w.double(), left.double().to(w.device), right.double().to(w.device))
            w.data.copy_(exact / (power_of_two_norm(k) * k))
        module.__class__ = RotatedLinear
        module._left, module._right = left.to(w.dtype), right.to(w.dtype)
        device = None if w.is_meta else w.device
        module.register_buffer(MARK, torch.tensor(hadamard_factors(k), device=device))
    return notes


def _unfit(module: nn.Module, uses: dict[int, int]) -> str:
    if isinstance(module, RotatedLinear):
        return "already rotated"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is not a plain nn.Linear"
    if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point():
        return "the weight is already quantized"
    if uses.get(id(module.weight), 0) > 1:
        return "the weight is tied"
    return (
        "" if hadamard_factors(module.in_features) != (0, 0) else f"no Hadamard matrix for {module.in_features} inputs"
    )


def undo_(module: nn.Module) -> None:
    """Restore the class nn.Linear; the caller must restore the weight."""
    module.__class__ = nn.Linear
    del module._left, module._right, module._buffers[MARK]
