"""torchao.prototype.moe_training.nvfp4_training: linear layers whose products are computed in NVFP4, by our recipe.

torchao's kernels need bfloat16, a GPU, and multiples of 128; here any size and device works. The signs of the Hadamard
rotation and the random numbers of stochastic rounding are functions of a seed, which a sign vector determines; results
differ from torchao's as those of two of its own seeds do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ....training import LowPrecisionLinear, Recipe, get_recipe, linear
from ..enums import KernelPreference

__all__ = [
    "NVFP4Linear", "NVFP4TrainingConfig", "get_hadamard_matrix", "get_rht_matrix", "get_wgrad_sign_vector",
    "nvfp4_linear",
]  # fmt: skip

Signs = Tensor | Sequence[int]


# -- Hadamard matrices -------------------------------------------------------------------------------------------------


def get_wgrad_sign_vector(shape: Any, device: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers -1 and 1, from torch's random numbers."""
    return torch.where(torch.rand(shape, device=device) >= 0.5, 1, -1).to(dtype)


def get_hadamard_matrix(hadamard_dimension: int, device: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Sylvester's Hadamard matrix of 16 by 16, divided by 4: its own inverse. Raises ValueError for another size."""
    if hadamard_dimension != 16:
        raise ValueError(f"Only hadamard dimension 16 is supported, got {hadamard_dimension}")
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / 4).to(device=device, dtype=dtype)


@cache
def get_rht_matrix(sign_vector: tuple[int, ...], device: Any, dtype: torch.dtype, hadamard_dimension: int, /) -> Tensor:
    """diag(signs) times the Hadamard matrix. Raises ValueError for signs of another length."""
    if len(sign_vector) != hadamard_dimension:
        raise ValueError(f"Expected sign_vector length {hadamard_dimension}, got {len(sign_vector)}")
    signs = torch.tensor(sign_vector, dtype=dtype, device=device)
    return signs.unsqueeze(1) * get_hadamard_matrix(hadamard_dimension, device, dtype)


# -- layers ------------------------------------------------------------------------------------------------------------


def _signs(sign_vector: Signs | None) -> tuple[int, ...] | None:
    if sign_vector is None:
        return None
    numbers = sign_vector.tolist() if isinstance(sign_vector, Tensor) else sign_vector
    signs = tuple(int(v) for v in numbers)
    if len(signs) != 16 or not {*signs} <= {-1, 1}:
        raise ValueError(f"rht_sign_vector must have 16 elements, each -1 or 1, got {signs}")
    return signs


def _recipe(signs: tuple[int, ...] | None) -> Recipe:
    """Recipe "nvfp4", whose seed is the bits of the signs; its own seed without them."""
    recipe = get_recipe("nvfp4")
    seed = sum(1 << i for i, sign in enumerate(signs or ()) if sign < 0)
    return recipe.with_(name=f"nvfp4 seed {seed}", seed=seed) if seed else recipe


def nvfp4_linear(
    input_hp: Tensor, weight_hp: Tensor, bias: Tensor | None = None, *, sign_vector: Signs | None = None,
    kernel_preference: KernelPreference = KernelPreference.TRITON, sr_seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """input [.., K] · weight [N, K]ᵀ + bias in NVFP4, with its gradients. sr_seed: accepted; the seed of stochastic
    rounding comes from the signs. Raises ValueError for other signs than 16 numbers -1 and 1."""
    return linear(input_hp, weight_hp, bias, _recipe(_signs(sign_vector)))


@dataclass(frozen=True)
class NVFP4TrainingConfig(AOBaseConfig):
    """``quantize_`` makes an :class:`NVFP4Linear` of each linear layer.

    kernel_preference  accepted; the kernel is chosen from the table of products
    rht_sign_vector    16 numbers -1 and 1, which determine the layer's seed

    Raises ValueError for a process group: torch's parallel styles shard the layer.
    """

    kernel_preference: KernelPreference = KernelPreference.TRITON
    process_group: Any = field(default=None, compare=False)
    world_size: int | None = None
    rht_sign_vector: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_group(self.process_group)
        _signs(self.rht_sign_vector)


def _check_group(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError(
            "process_group is not supported; shard the converted layers with parallelize_module and torch's "
            "ColwiseParallel or RowwiseParallel"
        )


class NVFP4Linear(LowPrecisionLinear):
    """nn.Linear whose three products are computed in NVFP4. Its state dict is nn.Linear's."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False,
        kernel_preference: KernelPreference = KernelPreference.TRITON, process_group: Any = None,
        world_size: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
        rht_sign_vector: Signs | None = None,
    ) -> None:  # fmt: skip
        _check_group(process_group)
        signs = _signs(rht_sign_vector)
        super().__init__(in_features, out_features, bias, _recipe(signs), device=device, dtype=dtype)
        self.kernel_preference, self.rht_sign_vector = kernel_preference, signs

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, kernel_preference: KernelPreference = KernelPreference.TRITON, process_group: Any = None,
        world_size: int | None = None, rht_sign_vector: Signs | None = None,
    ) -> NVFP4Linear:  # fmt: skip
        """A layer with the parameters of ``mod``, which are shared."""
        sizes = (mod.in_features, mod.out_features, False)
        made = cls(*sizes, kernel_preference, process_group, world_size, "meta", rht_sign_vector=rht_sign_vector)
        made.weight, made.bias = mod.weight, mod.bias
        return made.train(mod.training)


@register_quantize_module_handler(NVFP4TrainingConfig)
def _convert(module: nn.Module, config: NVFP4TrainingConfig) -> nn.Module:
    if isinstance(module, NVFP4Linear) or not isinstance(module, nn.Linear):
        return module
    return NVFP4Linear.from_linear(module, config.kernel_preference, rht_sign_vector=config.rht_sign_vector)
