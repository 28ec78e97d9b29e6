"""torchao.sparsity's functions and configs. Our :func:`pennyweight.sparsify_` has other methods and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....algorithms.sparsify import prune
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import HANDLERS, register_quantize_module_handler
from ..config_json import register_config_type
from ..quant_api import _ExtraRepr, _is_linear, _replace_with_custom_fn_if_matches_filter, quantize_
from ..v0_8_configs import stored_dense
from .block_sparse import BlockSparseTensor
from .pruning import WeightNormSparsifier

__all__ = [
    "BlockSparseWeightConfig", "SemiSparseWeightConfig", "apply_fake_sparsity", "block_sparse_weight",
    "semi_sparse_weight", "sparsify_",
]  # fmt: skip


def sparsify_(
    model: nn.Module, config: Any, filter_fn: Callable[[nn.Module, str], bool] | None = None, *,
    apply_tensor_subclass: Any = None,
) -> nn.Module:  # fmt: skip
    """Apply a config, or a function over modules, to the linear layers of a model, in place. Returns the model.

    config     SemiSparseWeightConfig, BlockSparseWeightConfig, or a config that quantizes, such as
               Int8DynamicActivationInt8WeightConfig(layout=SemiSparseLayout())
    filter_fn  (module, name) -> bool; default: linear layers
    """
    config = apply_tensor_subclass if config is None else config
    wanted = _is_linear if filter_fn is None else filter_fn
    if type(config) in HANDLERS:
        handler = HANDLERS[type(config)]
        _replace_with_custom_fn_if_matches_filter(model, lambda module: handler(module, config), wanted)
    else:
        quantize_(model, config, wanted)
    return model


def apply_fake_sparsity(model: nn.Module, **kwargs: Any) -> None:
    """Set the two smallest magnitudes of every four inputs to zero, in place. filter_fn: as in :func:`sparsify_`."""
    wanted = kwargs.pop("filter_fn", _is_linear)
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(
        model, [{"tensor_fqn": f"{name}.weight"} for name, m in model.named_modules() if wanted(m, name)]
    )
    sparsifier.step()
    sparsifier.squash_mask()


def _set_weight(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight, requires_grad=False)
    if type(module) is nn.Linear:
        module.extra_repr = _ExtraRepr(module)  # type: ignore[method-assign]
    return module


@register_config_type
@dataclass(frozen=True)
class BlockSparseWeightConfig(AOBaseConfig):
    """Weights without their blocks of zeros; blocks have ``blocksize`` rows and columns. Values do not change."""

    blocksize: int = 64


@register_quantize_module_handler(BlockSparseWeightConfig)
def _block_sparse(module: nn.Module, config: BlockSparseWeightConfig) -> nn.Module:
    weight: Any = module.weight
    return _set_weight(module, BlockSparseTensor.from_dense(weight, config.blocksize))


@register_config_type
@dataclass(frozen=True)
class SemiSparseWeightConfig(AOBaseConfig):
    """2:4 sparse weights: the two smallest magnitudes of every four inputs are zero.

    On a CUDA device the weight becomes torch's SparseSemiStructuredTensor, for which torch has products. Elsewhere it
    is a dense parameter with zeros; a warning says so once. alg_id: the kernel of cuSPARSELt, not chosen here.
    """

    alg_id: int = 0


@register_quantize_module_handler(SemiSparseWeightConfig)
def _semi_sparse(module: nn.Module, config: SemiSparseWeightConfig) -> nn.Module:
    weight: Any = module.weight
    pruned = prune(weight.detach(), "2:4")
    if not weight.is_cuda:
        stored_dense("SemiSparseWeightConfig")
        module.weight = nn.Parameter(pruned, requires_grad=False)
        return module
    return _set_weight(module, torch.sparse.to_sparse_semi_structured(pruned))


block_sparse_weight = BlockSparseWeightConfig
semi_sparse_weight = SemiSparseWeightConfig
