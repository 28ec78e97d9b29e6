"""Patches around prepared modules: torch's fused layers, which bypass their forward, and a delayed start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .modules import FakeQuantized, enable_fake_quant, fake_, fake_modules, restore_

# Class -> attribute that its fused path checks, and the value that disables it.
FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
STEP = "fake_quant_step"
_KEPT = "_fused_before_fake_quant"


def begin_(model: nn.Module, start: int) -> None:
    """Patch a model after its modules were prepared."""
    for module in list(model.modules()):
        attends = isinstance(module, nn.MultiheadAttention) and not isinstance(module, FakeQuantized)
        if attends and isinstance(module.out_proj, FakeQuantized):  # attention reads its weight directly
            fake_(module)
    leave_fused_paths_(model)
    if start:
        _end_delay(model)
        model.register_buffer(STEP, torch.zeros((), dtype=torch.int64, device="cpu"))
        enable_fake_quant(model, False)
        hook = DelayedStart(start)
        model.__dict__["_fake_quant_delay"] = model.register_forward_pre_hook(hook)


def end_(model: nn.Module) -> None:
    """After conversion: undo patches that no remaining prepared module needs."""
    for module in list(model.modules()):
        attends = isinstance(module, nn.MultiheadAttention) and isinstance(module, FakeQuantized)
        if attends and not module.fake_quantized and not isinstance(module.out_proj, FakeQuantized):
            restore_(module)
    take_fused_paths_(model)
    if not fake_modules(model):
        _end_delay(model)


def leave_fused_paths_(model: nn.Module) -> None:
    """Make modules that hold a prepared one call it: torch's fused path would read its float weight.

    A prepared module names its prepared parameters in ``fake_quantized``.
    """
    for module in model.modules():
        for kind, (name, no) in FUSED.items():
            if isinstance(module, kind) and _holds_prepared(module) and _KEPT not in module.__dict__:
                module.__dict__[_KEPT] = getattr(module, name)
                setattr(module, name, no)


def take_fused_paths_(model: nn.Module) -> None:
    """Undo :func:`leave_fused_paths_` where no prepared module remains."""
    for module in model.modules():
        for kind, (name, _) in FUSED.items():
            if isinstance(module, kind) and _KEPT in module.__dict__ and not _holds_prepared(module):
                setattr(module, name, module.__dict__.pop(_KEPT))


def _holds_prepared(module: nn.Module) -> bool:
    return any(getattr(m, "fake_quantized", ()) for m in module.modules())


def _end_delay(model: nn.Module) -> None:
    if "_fake_quant_delay" in model.__dict__:
        model.__dict__.pop("_fake_quant_delay").remove()
        del model._buffers[STEP]


class DelayedStart:
    """Counts a model's forward passes in training mode and enables fake quantization after ``start`` passes."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, model: nn.Module, args: Any) -> None:
        step = model.get_buffer(STEP)
        waiting = int(step) < self.start
        modules = fake_modules(model)
        if modules and modules[0][1].fake_quant_enabled == waiting:
            enable_fake_quant(model, not waiting)
        if waiting and model.training and torch.is_grad_enabled():
            step += 1
