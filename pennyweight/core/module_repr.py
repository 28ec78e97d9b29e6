"""print(model) shows what is quantized: Linear(in_features=512, out_features=64, bias=True, weight=int4, groups of 64).

The text is made from the module's parameters when it is printed, by a wrapper around ``nn.Module.__repr__``. Nothing is
stored in a module: its class, attributes and state dict stay what they are, so the text follows every way by which a
weight comes and goes, and calls of the module do not pass here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn

from .describe_spec import shorten
from .tensor import AffineQuantizedTensor

_MARK = "_pennyweight_shows_weights"


def show_weights(cls: type[nn.Module]) -> None:
    """Let the repr of a class of modules name its quantized parameters. Does nothing the second time."""
    original = cls.__repr__
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def repr_with_weights(self: nn.Module) -> str:
        return _insert(original(self), weights_text(self))

    setattr(repr_with_weights, _MARK, True)
    cls.__repr__ = repr_with_weights  # type: ignore[method-assign]


def weights_text(module: nn.Module) -> str:
    """The module's own quantized parameters: "weight=int4, groups of 64"; "" if there are none."""
    found: list[str] = []
    if "extra_repr" in module.__dict__:  # of this object alone: another library names the weight itself
        return ""
    for name, value in module.__dict__.get("_parameters", {}).items():
        local: Any = getattr(value, "_local_tensor", value)  # of a DTensor
        if isinstance(local, AffineQuantizedTensor):
            found.append(f"{name}={shorten(local.spec, local.act, local.ndim)}")
    return ", ".join(found)


def _insert(text: str, more: str) -> str:
    """Put ``more`` into the parentheses of a module's repr: at the end of one line, or as the first of several."""
    head, bracket, rest = text.partition("(")
    if not more or not bracket or not text.endswith(")"):
        return text
    if rest.startswith("\n"):
        return f"{head}(\n  {more}{rest}"
    return f"{head}({more})" if rest == ")" else f"{text[:-1]}, {more})"
