"""Sparsifiers and their schedules: torch.ao.pruning, from which torchao's were copied, with torchao's differences.

The mask of a parametrized weight is in the model's state dict, where torch's own class leaves it out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.ao import pruning as torchs
from torch.ao.pruning import (
    BaseScheduler,
    CubicSL,
    LambdaSL,
    fqn_to_module,
    get_arg_info_from_tensor_fqn,
    module_to_fqn,
)
from torch.ao.pruning.sparsifier.utils import module_contains_param, swap_module

__all__ = [
    "BaseScheduler", "BaseSparsifier", "CubicSL", "FakeSparsity", "LambdaSL", "NearlyDiagonalSparsifier",
    "WeightNormSparsifier", "fqn_to_module", "get_arg_info_from_tensor_fqn", "module_contains_param", "module_to_fqn",
    "swap_module",
]  # fmt: skip


class FakeSparsity(torchs.FakeSparsity):
    """Parametrization w * mask. The mask is a buffer, and is saved with the model."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.state_dict(self, *args, **kwargs)


class BaseSparsifier(torchs.BaseSparsifier):
    """Base of sparsifiers: ``update_mask(module, tensor_name, **options)`` sets the mask of one weight.

    prepare(model, config)  adds a mask of ones to each ``{"tensor_fqn": name, **options}`` of the config
    step()                  updates the masks
    squash_mask()           multiplies the weights by their masks and removes these
    convert(module, mapping)  replaces masked modules by others
    """

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        for config in self.groups:
            module, name = config["module"], config["tensor_name"]
            make = config.get("parametrization", FakeSparsity)
            mask = config["mask"] if "mask" in config else torch.ones_like(getattr(module, name).detach())
            self.state[config["tensor_fqn"]]["mask"] = mask
            nn.utils.parametrize.register_parametrization(module, name, make(mask))

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Masks and options from :meth:`state_dict`, into the prepared model, or a model that is not prepared yet."""
        super().load_state_dict(state_dict, strict)
        for group in self.groups:
            for mask in group["module"].parametrizations[group["tensor_name"]]:
                if type(mask) is torchs.FakeSparsity:
                    mask.__class__ = FakeSparsity

    def convert(
        self, module: nn.Module, mapping: dict[type[nn.Module], type[nn.Module]] | None = None, inplace: bool = False,
        parameterization: type[nn.Module] = FakeSparsity,
    ) -> nn.Module:  # fmt: skip
        """Replace each masked module whose type is a key of ``mapping`` by ``mapping[type].from_dense(module)``."""
        return super().convert(module, mapping, inplace, parameterization)


class WeightNormSparsifier(torchs.WeightNormSparsifier, BaseSparsifier):
    """Zeros the elements with the smallest norm in the blocks with the smallest norm; see torch's class."""


class NearlyDiagonalSparsifier(torchs.NearlyDiagonalSparsifier, BaseSparsifier):
    """Keeps the elements near the diagonal of a square weight; see torch's class."""
