"""torchao's autoquant (0.3 to 0.16): each linear layer gets the fastest of a list of weight classes, measured here.

    model = autoquant(model);  model(x)                                        # the first call measures and decides
    model = autoquant(model, manual=True);  model(x1);  model(x2);  model.finalize_autoquant()

A candidate's time is the sum over the inputs that its layer has seen, one measurement per shape and dtype, shared by
all layers. :func:`pennyweight.recommend` compares whole models instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....planning.layer_timing import least_seconds, wait_for
from ..base_tensor import TorchAOBaseTensor
from ..groupwise import compute_error
from ..linear_modules import Filter, _is_linear
from .autoquant_classes import (
    ALL_AUTOQUANT_CLASS_LIST,
    DEFAULT_AUTOQUANT_CLASS_LIST,
    DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST,
    DEFAULT_INT4_AUTOQUANT_CLASS_LIST,
    DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST,
    GEMLITE_INT4_AUTOQUANT_CLASS_LIST,
    OTHER_AUTOQUANT_CLASS_LIST,
    AQDefaultLinearWeight,
)

__all__ = [
    "ALL_AUTOQUANT_CLASS_LIST",
    "AUTOQUANT_CACHE",
    "DEFAULT_AUTOQUANT_CLASS_LIST",
    "DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST",
    "DEFAULT_INT4_AUTOQUANT_CLASS_LIST",
    "DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST",
    "GEMLITE_INT4_AUTOQUANT_CLASS_LIST",
    "OTHER_AUTOQUANT_CLASS_LIST",
    "AutoQuantizableLinearWeight",
    "_change_autoquantizable_to_quantized",
    "_change_linears_to_autoquantizable",
    "autoquant",
    "autoquant_v2",
    "check_cache",
    "update_cache",
]  # fmt: skip

logger = logging.getLogger(__name__)
SECONDS = 0.03  # to measure one candidate at one shape
Shapes = tuple[
    torch.Size, torch.Size, torch.Size | None, torch.dtype
]  # of input rows, weight, bias; dtype of the input

AUTOQUANT_CACHE: dict[Any, float | None] = {}  # (class, *Shapes) -> milliseconds, inf for a failure; None: not measured


def check_cache(cls: Any, shapes_and_dtype: Shapes) -> float | None:
    """Milliseconds of a class, or None if not measured."""
    return AUTOQUANT_CACHE.get((cls, *shapes_and_dtype))


def update_cache(cls: Any, shapes_and_dtype: Shapes, res: float | None) -> None:
    AUTOQUANT_CACHE[(cls, *shapes_and_dtype)] = res


class AutoQuantizableLinearWeight(TorchAOBaseTensor):
    """A float weight that counts the shapes of its inputs: ``logged_data``. ``to_quantized`` gives the fastest class.

    min_sqnr  in dB: classes whose output has a lower signal-to-noise ratio are not candidates
    """

    tensor_data_names = ["weight"]  # noqa: RUF012
    tensor_attribute_names = ["qtensor_class_list"]  # noqa: RUF012
    optional_tensor_attribute_names = ["mode", "min_sqnr", "logged_data"]  # noqa: RUF012
    weight: Tensor

    @staticmethod
    def __new__(cls: Any, weight: Tensor, *args: Any, **kwargs: Any) -> AutoQuantizableLinearWeight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=weight.device, requires_grad=False
        )

    def __init__(
        self, weight: Tensor, qtensor_class_list: Sequence[Any], *args: Any, mode: Any = None,
        min_sqnr: float | None = None, logged_data: dict[Shapes, int] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.weight, self.qtensor_class_list, self.min_sqnr = weight, list(qtensor_class_list), min_sqnr
        self.mode = ["relu", None] if mode is None else mode
        self.logged_data = {} if logged_data is None else logged_data

    @classmethod
    def from_float(cls, weight: Tensor, qtensor_class_list: Sequence[Any], **kwargs: Any) -> Any:
        return cls(weight.detach(), qtensor_class_list, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = [q.__name__ for q in self.qtensor_class_list]
        return f"AutoQuantizableLinearWeight(shape={tuple(self.shape)}, dtype={self.dtype}, qtensor_class_list={names})"

    @staticmethod
    def log_shape(act_mat: Tensor, w_autoquant: Any, bias: Tensor | None) -> None:
        """Count one input [.., K] of the weight."""
        rows = act_mat.reshape(-1, act_mat.shape[-1])
        key = (rows.shape, w_autoquant.shape, None if bias is None else bias.shape, act_mat.dtype)
        w_autoquant.logged_data[key] = 1 + w_autoquant.logged_data.get(key, 0)
        for q_cls in w_autoquant.qtensor_class_list:
            AUTOQUANT_CACHE.setdefault((q_cls, *key), None)

    @torch.no_grad()
    def tune_autoquant(self, q_cls: Any, shapes_and_dtype: Shapes, best_time: float = float("inf")) -> None:
        """Measure a class at one shape unless it was, into AUTOQUANT_CACHE. A class that fails gets inf, with a logged
        warning. Times are shared by all weights of a shape; ``min_sqnr`` is checked for each weight."""
        if check_cache(q_cls, shapes_and_dtype) is not None:
            return
        try:
            x, bias = self._input(shapes_and_dtype)
            w = q_cls.from_float(self.weight)
            found = least_seconds([lambda: q_cls._quantized_linear_op(x, w, bias)], SECONDS, wait_for(self.device))
            update_cache(q_cls, shapes_and_dtype, 1e3 * found[0])
        except Exception as error:  # any failure of one candidate leaves the others
            logger.warning("autoquant: %s failed for %s: %s", q_cls.__name__, shapes_and_dtype, error)
            update_cache(q_cls, shapes_and_dtype, float("inf"))

    def _input(self, shapes_and_dtype: Shapes) -> tuple[Tensor, Tensor | None]:
        act_shape, _, bias_shape, dtype = shapes_and_dtype
        seed = torch.Generator().manual_seed(0)
        x = torch.randn(act_shape, generator=seed, dtype=torch.float32, device="cpu").to(self.device, dtype)
        return x, None if bias_shape is None else torch.zeros(bias_shape, dtype=dtype, device=self.device)

    def _accurate(self, q_cls: Any) -> bool:
        """Whether the output of a class for random inputs has at least ``min_sqnr`` dB."""
        if self.min_sqnr is None:
            return True
        x, bias = self._input(next(iter(self.logged_data)))
        wanted = F.linear(x, self.weight.to(x.dtype), bias)
        sqnr = float(compute_error(wanted, q_cls._quantized_linear_op(x, q_cls.from_float(self.weight), bias)))
        if sqnr < self.min_sqnr:
            logger.info("autoquant: %s has %.1f dB, min_sqnr is %s", q_cls.__name__, sqnr, self.min_sqnr)
        return sqnr >= self.min_sqnr

    @torch.no_grad()
    def to_quantized(self, error_on_unseen: bool = True, **kwargs: Any) -> Tensor:
        """The weight as the fastest class, of several the last in the list. A weight without inputs stays float, or
        with ``error_on_unseen`` raises RuntimeError."""
        if not self.logged_data:
            if error_on_unseen:
                raise RuntimeError("must run module normally to get shape, dtype info for autoquant")
            return self.weight
        best, best_cls = float("inf"), AQDefaultLinearWeight
        for q_cls in self.qtensor_class_list:
            total = 0.0
            for key, times in self.logged_data.items():
                self.tune_autoquant(q_cls, key, best)
                total += (check_cache(q_cls, key) or 0.0) * times
            if total != float("inf") and total <= best and self._accurate(q_cls):
                best, best_cls = total, q_cls
        return best_cls.from_float(self.weight)


@AutoQuantizableLinearWeight.implements_torch_function([F.linear, torch.ops.aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, w, bias = given["input"], given["weight"], given.get("bias")
    AutoQuantizableLinearWeight.log_shape(x, w, bias)
    return F.linear(x, w.weight, bias)


def _is_autoquantizable(module: Any, *args: Any) -> bool:
    return isinstance(getattr(module, "weight", None), AutoQuantizableLinearWeight)


def _change_linears_to_autoquantizable(
    model: nn.Module, filter_fn: Filter | None = None, qtensor_class_list: Sequence[Any] | None = None,
    mode: Any = None, min_sqnr: float | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Make the weights of linear layers count their inputs."""
    classes = DEFAULT_AUTOQUANT_CLASS_LIST if qtensor_class_list is None else qtensor_class_list
    for name, module in list(model.named_modules()):
        if (filter_fn or _is_linear)(module, name) and not _is_autoquantizable(module):
            new = AutoQuantizableLinearWeight.from_float(module.weight, classes, mode=mode, min_sqnr=min_sqnr)  # type: ignore[arg-type]
            module.weight = nn.Parameter(new, requires_grad=False)


def _change_autoquantizable_to_quantized(
    model: nn.Module, supress_autoquant_errors: bool = True, error_on_unseen: bool = True,
    filter_fn: Callable[..., bool] | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Measure, and give each layer its weight."""
    for name, module in list(model.named_modules()):
        if (filter_fn or _is_autoquantizable)(module, name):
            found = module.weight.to_quantized(error_on_unseen)  # type: ignore[operator, union-attr]
            module.weight = nn.Parameter(found.detach(), requires_grad=False)


@torch.no_grad()
def autoquant(
    model: Any, example_input: Any = None, qtensor_class_list: Sequence[Any] | None = None,
    filter_fn: Filter | None = None, mode: Any = None, manual: bool = False, set_inductor_config: bool = True,
    supress_autoquant_errors: bool = True, min_sqnr: float | None = None, **aq_kwargs: Any,
) -> nn.Module:  # fmt: skip
    """The model itself, whose linear layers get the fastest class of the list at the first call, or with ``manual`` at
    ``model.finalize_autoquant()``. A compiled model is measured before it is compiled.

    example_input   a tensor, or a tuple of arguments: the first call is made here
    qtensor_class_list  default: float, int8 weights, int8 weights with int8 inputs
    min_sqnr        of a layer's output, in dB
    aq_kwargs       ``error_on_unseen=False``: layers without inputs stay float instead of an error

    mode, set_inductor_config and supress_autoquant_errors are accepted and ignored: layers are timed as they run here,
    no process-wide setting is changed, and a failing candidate is logged.
    """
    _change_linears_to_autoquantizable(model, filter_fn, qtensor_class_list, mode, min_sqnr)
    real = getattr(model, "_orig_mod", model)
    unseen = {name: aq_kwargs[name] for name in ("error_on_unseen",) if name in aq_kwargs}
    handles: list[Any] = []

    def finalize_autoquant() -> None:
        for handle in handles:
            handle.remove()
        if "forward" in model.__dict__ and model is not real:
            del model.__dict__["forward"]
            model.forward = compiled_forward
        real.__dict__.pop("finalize_autoquant", None)
        _change_autoquantizable_to_quantized(real, supress_autoquant_errors, **unseen)

    def first_call(module: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            real.forward(*args, **kwargs)
            finalize_autoquant()

    compiled_forward = model.forward if model is not real else None
    if manual and model is not real:
        model.forward = real.forward  # calls that only count must not compile
    elif not manual:
        handles.append(model.register_forward_pre_hook(first_call, with_kwargs=True))
    real.finalize_autoquant = finalize_autoquant
    if isinstance(example_input, Tensor):
        example_input = (example_input,)
    if isinstance(example_input, (tuple, list)):
        model(*example_input)
    return model  # type: ignore[no-any-return]


def autoquant_v2(
    model: Any, example_input: Any = None, qtensor_class_list: Sequence[Any] | None = None,
    filter_fn: Filter | None = None, mode: Any = None, manual: bool = False, set_inductor_config: bool = True,
    supress_autoquant_errors: bool = True, batch_size: int | None = None, **aq_kwargs: Any,
) -> nn.Module:  # fmt: skip
    """:func:`autoquant`; torchao's version timed the subgraph around each layer. ``batch_size`` is ignored."""
    return autoquant(
        model, example_input, qtensor_class_list, filter_fn, mode, manual, set_inductor_config,
        supress_autoquant_errors, **aq_kwargs,
    )  # fmt: skip
