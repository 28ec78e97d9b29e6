"""lower_pt2e_quantized_to_x86: a converted graph on int8 kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from pennyweight.export.lower_graph import lower

__all__ = ["lower_pt2e_quantized_to_x86"]


def lower_pt2e_quantized_to_x86(model: GraphModule, example_inputs: tuple[Tensor, ...]) -> GraphModule:
    """:func:`pennyweight.lower`: this package's kernels, not oneDNN's; sizes of inputs stay as free as they were.

    example_inputs: not needed, they are run once to raise errors here rather than at the first use.
    """
    lowered: Any = lower(model).model
    lowered(*example_inputs)
    return lowered  # type: ignore[no-any-return]
