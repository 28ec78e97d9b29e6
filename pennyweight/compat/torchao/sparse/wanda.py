"""WandaSparsifier: prunes by magnitude times the norm of the inputs, which an observer collects."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.pruning import BaseSparsifier, get_arg_info_from_tensor_fqn

from ....algorithms.sparsify import SparsityPattern

__all__ = ["PerChannelNormObserver", "WandaSparsifier"]


class PerChannelNormObserver(nn.Module):
    """Sums the squares of each channel (the last axis) of its inputs in the buffer ``norm``.

    Arguments are those of torch's observers, and have no effect: nothing is quantized.
    """

    averaging_constant = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.register_buffer("norm", torch.tensor([]))

    def forward(self, x_orig: Tensor) -> Tensor:
        """The input unchanged."""
        if x_orig.numel():
            # Norm squared, not a sum of squares: the same rounding as torchao's.
            rows = x_orig.detach().movedim(-1, 0).flatten(1)
            norm = torch.linalg.vector_norm(rows, dim=1) ** 2
            self.norm = norm if self.norm.numel() == 0 else self.norm + norm
        return x_orig

    def calculate_qparams(self) -> None:
        """Raises NotImplementedError: it observes norms, not ranges."""
        raise NotImplementedError("PerChannelNormObserver is designed to store activations only.")

    @classmethod
    def with_args(cls, **kwargs: Any) -> Any:
        """A constructor with these arguments, as torch's observers have."""
        from functools import partial

        return partial(cls, **kwargs)


class WandaSparsifier(BaseSparsifier):
    """Prunes the smallest |w_ij| |x_j|^2 (Sun et al. 2023, with the square of the norm, as torchao has it).

    prepare(model, config)  watches the inputs of these layers; None: of every layer that BaseSparsifier supports
    (calls of the model)    collect the norms
    step(), squash_mask()   prune, and remove observers and masks

    sparsity_level              fraction of zeros of each layer
    semi_structured_block_size  4: 2 zeros of each 4 inputs instead, and so on

    Like torchao's it is one of torch.ao.pruning's sparsifiers: masks are not in the model's state dict.
    ``pennyweight.sparsify_(model, "wanda", calibration=batches)`` prunes each row by itself, as the paper does.
    """

    def __init__(self, sparsity_level: float = 0.5, semi_structured_block_size: int | None = None) -> None:
        if semi_structured_block_size is not None:
            m = semi_structured_block_size
            warnings.warn(
                f"WandaSparsifier got semi_structured_block_size={m}: sparsity_level is fixed to 50% ({m // 2}:{m})",
                stacklevel=2,
            )
        super().__init__({"sparsity_level": sparsity_level, "semi_structured_block_size": semi_structured_block_size})

    def prepare(self, model: nn.Module, config: Any) -> None:
        if config is None:
            self.make_config_from_model(model)
            config = self.config
        for entry in config:
            name = entry.get("tensor_fqn")
            if name is None:
                raise ValueError("Each config must contain a 'tensor_fqn'.")
            module = get_arg_info_from_tensor_fqn(model, name)["module"]
            if module is None:
                raise ValueError(f"the model has no module for {name}")
            module.activation_post_process = PerChannelNormObserver()
            module._wanda_hook = module.register_forward_pre_hook(_observe)
        super().prepare(model, config)

    def update_mask(self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: Any) -> None:
        mask = getattr(module.parametrizations, tensor_name)[0].mask
        weight = getattr(module.parametrizations, tensor_name).original
        norm = module.activation_post_process.norm
        if norm.numel() == 0:
            raise ValueError("WandaSparsifier.step: a layer has seen no input; call the model with data before")
        score = weight.detach().abs() * norm
        block = kwargs.get("semi_structured_block_size")
        if block is not None:
            if score.numel() % block:
                raise ValueError(f"blocks of {block} do not divide a weight of {list(score.shape)}")
            pattern = SparsityPattern(f"{block // 2}:{block}", block - block // 2, block)
            keep = pattern.keep(score.reshape(-1, block)).view(score.shape)
        else:
            keep = SparsityPattern("", share=sparsity_level).keep(score, int(score.numel() * sparsity_level))
        mask.data.masked_fill_(~keep, 0)

    def squash_mask(
        self, params_to_keep: tuple[str, ...] | None = None,
        params_to_keep_per_layer: dict[str, tuple[str, ...]] | None = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        for config in self.groups:
            module = config["module"]
            if hasattr(module, "_wanda_hook"):
                module._wanda_hook.remove()
                del module._wanda_hook, module.activation_post_process
        super().squash_mask(params_to_keep, params_to_keep_per_layer)


def _observe(module: nn.Module, args: tuple[Any, ...]) -> None:
    module.activation_post_process(args[0])
