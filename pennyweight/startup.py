"""What ``import pennyweight`` does at once: tensors, kernels, and hooks into other packages.

Tensors and kernels are imported, so that a pickled weight loads and runs. The hooks let ``from_pretrained`` read
quantized folders whether this package is imported before or after transformers. Only the command line imports the
package without this module, and then this module before a command runs.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from torch import nn

from .core import distributed_hooks
from .core.module_repr import show_weights
from .core.tensor import AffineQuantizedTensor
from .kernels import table  # noqa: F401  # not `from . import kernels`, which asks the package for a public name first
from .support.import_hooks import after_import

_PACKAGE = __package__ or "pennyweight"
# the modules and base classes of models with save_pretrained
_TRANSFORMERS = ("transformers.modeling_utils", "PreTrainedModel")
_DIFFUSERS = ("diffusers.models.modeling_utils", "ModelMixin")


def _register_with_transformers() -> None:
    import_module(".integrations.transformers.entry", _PACKAGE).register()


def _register_with_accelerate() -> None:
    import_module(".integrations.accelerate", _PACKAGE).register()


def _callers() -> Any:
    return import_module(".integrations.callers", _PACKAGE)


def _register_verifier() -> None:
    from .io.loading import VERIFIER

    VERIFIER.append(lambda: import_module(".report.golden_files", _PACKAGE))


def _register_model_libraries() -> None:
    from .quantize.save_pretrained import LIBRARIES, Library

    def adapter(name: str) -> Any:
        return lambda: import_module(f".integrations.{name}", _PACKAGE)

    LIBRARIES.append(Library(*_TRANSFORMERS, adapter("transformers.adapter")))
    LIBRARIES.append(Library(*_DIFFUSERS, adapter("diffusers")))


def _settle_when_saved(module: str, base: str) -> None:
    """Let ``save_pretrained`` settle a model of which ``quantize_`` or ``dequantize_`` saw only a part."""
    owner = getattr(import_module(module), base)
    plain = owner.save_pretrained

    @wraps(plain)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        quantizer = getattr(self, "hf_quantizer", None)
        ours = quantizer is None or type(quantizer).__module__.startswith(f"{_PACKAGE}.")
        if ours and any(isinstance(p, AffineQuantizedTensor) for p in self.parameters()) != (quantizer is not None):
            import_module(".quantize.save_pretrained", _PACKAGE).settle_saving_(self)
        return plain(self, *args, **kwargs)

    owner.save_pretrained = save_pretrained


# print(model) shows what is quantized; Conv1D has a __repr__ of its own
show_weights(nn.Module)
after_import("transformers.pytorch_utils", lambda: show_weights(import_module("transformers.pytorch_utils").Conv1D))
after_import("transformers.quantizers.auto", _register_with_transformers)
after_import("diffusers.quantizers.auto", lambda: import_module(".integrations.diffusers", _PACKAGE))
after_import(_TRANSFORMERS[0], lambda: _settle_when_saved(*_TRANSFORMERS))
after_import(_DIFFUSERS[0], lambda: _settle_when_saved(*_DIFFUSERS))
after_import("accelerate.utils.modeling", _register_with_accelerate)
after_import("accelerate.utils.offload", lambda: _callers().register_accelerate())
after_import("peft.utils.other", lambda: _callers().register_peft())
after_import("torch.onnx", lambda: import_module(".export.torch_onnx", _PACKAGE).explain_failures())
distributed_hooks.load_with(lambda: import_module(".distributed.dispatch", _PACKAGE))
# Tables of lower layers with entries from higher ones, filled as soon as their module is imported
after_import(f"{_PACKAGE}.io.loading", _register_verifier)
after_import(f"{_PACKAGE}.quantize.save_pretrained", _register_model_libraries)
