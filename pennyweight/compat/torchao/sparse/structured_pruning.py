"""Structured pruning: whole rows of a weight are removed, and the columns of the next layer with them.

torch.ao.pruning's, with torchao's addition: dropout may stand between two layers as an activation does.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.ao.pruning._experimental import pruner as torchs
from torch.ao.pruning._experimental.pruner import base_structured_sparsifier as torch_patterns
from torch.ao.pruning._experimental.pruner.match_utils import apply_match
from torch.ao.pruning._experimental.pruner.parametrization import (
    BiasHook,
    FakeStructuredSparsity,
    module_contains_param,
)
from torch.ao.pruning._experimental.pruner.prune_functions import (
    prune_conv2d,
    prune_conv2d_activation_conv2d,
    prune_conv2d_activation_pool_conv2d,
    prune_conv2d_conv2d,
    prune_conv2d_padded,
    prune_conv2d_pool_activation_conv2d,
    prune_conv2d_pool_flatten_linear,
    prune_linear,
    prune_linear_activation_linear,
    prune_linear_linear,
    prune_lstm_output_layernorm_linear,
    prune_lstm_output_linear,
)

__all__ = [
    "BaseStructuredSparsifier", "BiasHook", "FPGMPruner", "FakeStructuredSparsity", "LSTMSaliencyPruner",
    "SaliencyPruner", "apply_match", "module_contains_param", "prune_conv2d", "prune_conv2d_activation_conv2d",
    "prune_conv2d_activation_pool_conv2d", "prune_conv2d_conv2d", "prune_conv2d_padded",
    "prune_conv2d_pool_activation_conv2d", "prune_conv2d_pool_flatten_linear", "prune_linear",
    "prune_linear_activation_linear", "prune_linear_linear", "prune_lstm_output_layernorm_linear",
    "prune_lstm_output_linear",
]  # fmt: skip

_LIKE = {nn.ReLU: nn.Dropout, F.relu: F.dropout}


def _patterns() -> dict[Any, Any]:
    """torch's patterns, and each that has a ReLU again with dropout in its place."""
    known = torch_patterns._get_default_structured_pruning_patterns()
    for pattern, function in list(known.items()):
        other = tuple(_LIKE.get(part, part) for part in pattern)
        if other != pattern:
            known.setdefault(other, function)
    return known


class BaseStructuredSparsifier(torchs.BaseStructuredSparsifier):
    """Base of structured pruners: ``update_mask`` chooses rows, ``prune()`` removes them; see torch's class.

    patterns: sequences of modules and functions -> how to prune them; None: the default ones, with dropout.
    """

    def __init__(self, defaults: dict[str, Any], patterns: dict[Any, Any] | None = None) -> None:
        super().__init__(defaults, patterns)
        self.patterns = _patterns() if patterns is None else patterns


class SaliencyPruner(torchs.SaliencyPruner, BaseStructuredSparsifier):
    """Removes the fraction ``sparsity_level`` of the rows with the smallest L1 norm."""


class LSTMSaliencyPruner(torchs.LSTMSaliencyPruner, BaseStructuredSparsifier):
    """:class:`SaliencyPruner` for the four gates of an LSTM, each by itself."""


class FPGMPruner(torchs.FPGMPruner, BaseStructuredSparsifier):
    """Removes the rows nearest to the others (He et al. 2019, filter pruning via geometric median)."""
