"""Checks of arguments that are models, tensors and dtypes, and the checks of whole functions and classes.

:func:`check_arguments` applies checks to a function by the names of its parameters, :class:`CheckedFields` to the
constructor of a class by the annotations of its parameters. All checks run before anything is changed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ..support.arguments import (
    check_bytes,
    check_number,
    check_optional_path,
    check_path,
    check_progress,
    check_skip,
    describe_with,
    did_you_mean,
    hint,
    show,
)
from ..support.errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")
Check = Callable[[str, Any], None]  # (name of the argument, value); raises TypeError or ValueError

_IN_PLACE = (
    "functions whose names end in _, such as quantize_, change the model in place and return a report: use the model "
    "that was passed, without model = ..."
)


class ReturnedInPlaceOfModel:
    """Base of what functions that change a model in place return. Used as the model, it says so.

    ``model = quantize_(model, config)`` is the habit of functions that return a model.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} is not the model and cannot be called; {_IN_PLACE}")

    def __getattr__(self, name: str) -> Any:
        said = ""
        if not name.startswith("_"):
            said = f"; {_IN_PLACE}" if hasattr(nn.Module, name) else did_you_mean(name, dir(self), 1, 0.6)
            if name == "to_html":
                said = "; notebooks show it as HTML, and the command pennyweight report FOLDER writes a page"
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}{said}")


def _describe(value: object) -> str:
    """How messages quote models, tensors and reports; "" for other values."""
    if isinstance(value, nn.Module):
        return f"a model ({type(value).__name__})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, Mapping) and value and all(isinstance(v, Tensor) for v in value.values()):
        return f"a state dict of {len(value)} tensors"
    return f"a {type(value).__name__}" if isinstance(value, ReturnedInPlaceOfModel) else ""  # its text is a table


describe_with(_describe)


# -- kinds of arguments ------------------------------------------------------------------------------------------------


def check_model(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a module."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, (str, os.PathLike)):
        remedy = "load it first, for example with AutoModelForCausalLM.from_pretrained(path); pw.quantize_checkpoint "
        remedy += "and pw.convert take paths"
    elif isinstance(value, Tensor):
        remedy = "pass the module that holds it, or wrap it in one"
    elif isinstance(value, Mapping):
        remedy = "create the model and load it first: model.load_state_dict(state)"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        remedy = f"pass an instance, {value.__name__}(...)"
    elif isinstance(value, ReturnedInPlaceOfModel):
        remedy = _IN_PLACE
    elif value is None:
        remedy = "pass the model itself; functions whose names end in _ change it in place and do not return it"
    else:
        remedy = "the model is a torch.nn.Module; check the order of the arguments"
    raise ArgumentTypeError(f"{name} must be a torch.nn.Module, got {show(value)}; {remedy}")


def check_storable(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a module or a mapping, such as its state dict."""
    if not isinstance(value, (nn.Module, Mapping)):
        raise ArgumentTypeError(
            f"{name} must be a torch.nn.Module or a state dict, got {show(value)}; "
            + (
                "exchange the arguments: save(model, path)"
                if isinstance(value, (str, os.PathLike))
                else "pass the model"
            )
        )


def check_mapping(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a mapping, such as a state dict."""
    if not isinstance(value, Mapping):
        remedy = "; pass model.state_dict()" if isinstance(value, nn.Module) else ""
        raise ArgumentTypeError(f"{name} must be a mapping, got {show(value)}{remedy}")


def check_filter(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a function of (module, name)."""
    if value is None:
        return
    if not callable(value) or isinstance(value, type):
        skip = [value] if isinstance(value, str) else "[...]"
        raise ArgumentTypeError(
            f"{name} must be a function (module, name) -> bool, got {show(value)}; to leave layers out by name pass "
            f"skip={skip}, to select layers by name pass a config FqnToConfig({{name: config}})"
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function without a signature
        return
    try:
        signature.bind(nn.Identity(), "")
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is called with (module, name), but it takes {signature}; write "
            f"{name}=lambda module, name: isinstance(module, torch.nn.Linear)"
        ) from None


def check_device(name: str, value: object) -> None:
    """Raise ValueError unless the value is a device of this machine."""
    if value is None:
        return
    example = "pass a device such as 'cpu', 'cuda', 'cuda:1' or 'mps'"
    if not isinstance(value, (str, torch.device)):
        raise ArgumentTypeError(f"{name} must be a device, got {show(value)}; {example}")
    try:
        device = torch.device(value)
    except RuntimeError:
        known = ("cpu", "cuda", "mps", "xpu", "meta")
        guess = hint(["cuda"]) if value == "gpu" else did_you_mean(value, known, 1)
        raise ValueError(f"{name}={value!r} is not a device{guess}; {example}") from None
    if device.type in ("cpu", "meta"):
        return
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "is_available") and not backend.is_available():
        raise ValueError(
            f"{name}={str(value)!r}: this machine or this build of torch has no {device.type} device "
            f"(torch.{device.type}.is_available() is False); pass {name}='cpu' or leave it out"
        )


def check_dtype(name: str, value: object) -> None:
    """Raise unless the value is None or a floating-point dtype."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        torch_dtype = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        example = f"torch.{value}" if torch_dtype else "torch.float16"
        raise ArgumentTypeError(f"{name} must be a torch dtype such as {example}, got {show(value)}")
    if not value.is_floating_point:
        raise ValueError(f"{name} must be a floating-point dtype such as torch.float16, got {value}")


# -- functions ---------------------------------------------------------------------------------------------------------

# What a parameter of this name takes, in every function with @check_arguments; its default is always allowed
KINDS: dict[str, Check] = {
    **dict.fromkeys(("model", "float_model", "quantized"), check_model),
    **dict.fromkeys(("path", "src", "dst", "folder"), check_path),
    **dict.fromkeys(("names", "imatrix"), check_optional_path),
    "filter_fn": check_filter,
    "device": check_device,
    "dtype": check_dtype,
    "skip": check_skip,
    "progress": check_progress,
    "max_shard_bytes": check_bytes,
}
# How a missing argument is explained
_EXAMPLES = {
    "config": 'a config such as pw.Int8WeightOnlyConfig(), or a name such as "int8"',
    "model": "a torch.nn.Module",
    "batches": "a list of batches",
    "example_inputs": "an input of the model: a tensor, a tuple of arguments, or a mapping of keyword arguments",
    "budget": 'a budget such as "4.25 bpw" or "600 MB"',
    "path": "the path of a file or folder",
}


# Arguments of configs that are passed to functions with a config
_OF_CONFIGS = {
    "group_size": "the group size in its config: pw.Int4WeightOnlyConfig(group_size=64)",
    "bits": 'the bits in its config: "int4", "int8", pw.IntxWeightOnlyConfig("int3", pw.PerGroup(64))',
}


def check_arguments(**kinds: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: its arguments are checked by the names of its parameters.

    kinds   checks of this function's own parameters, before those in ``KINDS``

    Unknown keywords get a suggestion, missing arguments an example. Raises TypeError for both, and what the checks
    raise, before the function is called.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, owner = inspect.signature(function), getattr(function, "__name__", "")
        checks = {name: check for name, check in {**KINDS, **kinds}.items() if name in signature.parameters}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = bind(owner, signature, args, kwargs)
            for name, check in checks.items():
                if name in given and given[name] is not signature.parameters[name].default:
                    if check is check_model:
                        _check_order(name, given)
                    check(name, given[name])
            return function(*args, **kwargs)

        return checked

    return decorate


def _check_order(name: str, given: Mapping[str, Any]) -> None:
    """Raise ArgumentTypeError if another argument is the model."""
    other = next((key for key, value in given.items() if isinstance(value, nn.Module)), name)
    if not isinstance(given[name], nn.Module) and other != name and KINDS.get(other) is not check_model:
        raise ArgumentTypeError(
            f"{name} must be a torch.nn.Module, got {show(given[name])}, while {other} is {show(given[other])}; "
            "exchange them"
        )


def bind(owner: str, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The given arguments by name. Raises TypeError for an unknown or missing one, with its name and a remedy."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError:
        parameters = signature.parameters
        unknown = [name for name in kwargs if name not in parameters]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known = [name for name in parameters if name != "self"]
            listed = ", ".join(known) if len(known) < 20 else f"{', '.join(known[:18])}, ..."
            guess = did_you_mean(unknown[0], known, 2, 0.55)
            if "config" in known and unknown[0] in _OF_CONFIGS:
                listed = f"{_OF_CONFIGS[unknown[0]]}"
            raise TypeError(f"{owner} has no argument {unknown[0]!r}{guess}; it takes {listed}") from None
        missing = [
            name
            for name, p in list(parameters.items())[len(args) :]
            if p.default is p.empty and name not in kwargs and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if missing:
            example = _EXAMPLES.get(missing[0], "")
            raise TypeError(f"{owner} needs {missing[0]}{f': {example}' if example else ''}") from None
        placed = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(args) > len(placed):
            named = [n for n in parameters if n not in placed]
            others = f"; pass others by name: {', '.join(named)}" if named else ""
            raise TypeError(
                f"{owner} takes {len(placed)} arguments by position ({', '.join(placed)}), got {len(args)}{others}"
            ) from None
        raise


# -- classes -----------------------------------------------------------------------------------------------------------


@functools.cache
def _parameters(cls: Any) -> inspect.Signature:
    """The signature of a class's constructor, without self."""
    found = inspect.signature(cls.__init__)
    return found.replace(parameters=[p for name, p in found.parameters.items() if name != "self"])


def _checked_field(owner: str, name: str, annotation: object, value: object, dtypes: Sequence[str]) -> None:
    """Check a value by the annotation of its parameter; annotations without a rule allow everything.

    dtypes: parameters for number formats, which a text in place of a size probably is
    """
    base, _, optional = str(annotation).partition(" | ")
    if value is None and optional == "None":
        return
    if optional not in ("", "None"):
        return
    what = f"{owner}: {name}"
    if base == "int":
        if dtypes and isinstance(value, str) and not value.isdigit():
            remedy = f"pass formats by keyword: {dtypes[0]}={value!r}"
            raise ArgumentTypeError(f"{what} must be a positive integer, got {value!r}; {remedy}")
        check_number(what, value, integer=True, positive=name.endswith("_size"))
    elif base == "float":
        if not isinstance(value, Tensor):
            check_number(what, value)
    elif base == "torch.dtype":
        check_dtype(what, value)
    elif base == "MappingType" and type(value).__name__ != base:
        members = "pw.MappingType.SYMMETRIC or pw.MappingType.ASYMMETRIC"
        raise ArgumentTypeError(f"{what} must be a MappingType: {members}, got {show(value)}")


class CheckedFields:
    """Base of classes of options: checks the arguments of the constructor by its annotations, before it runs.

    ``int``, ``float``, ``torch.dtype``, ``MappingType``, each also ``| None``; an int named ``..._size`` is positive.
    Raises TypeError for an unknown or missing argument, ArgumentTypeError and ValueError for a wrong one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            made: Any = cls
            signature = _parameters(made)
            dtypes = [name for name, p in signature.parameters.items() if p.annotation == "AnyDtype"]
            for name, value in bind(cls.__name__, signature, args, kwargs).items():
                parameter = signature.parameters[name]
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    _checked_field(cls.__name__, name, parameter.annotation, value, dtypes)
        return super().__new__(cls)
