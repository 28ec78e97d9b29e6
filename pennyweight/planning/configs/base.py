"""Base class of configs, and helpers shared by the built-in ones."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch

from ...core.formats import E2M1, E4M3, E5M2, TERNARY, Format, get_format
from ...core.model_arguments import CheckedFields
from ...core.qparams import RULES
from ...core.spec import ActivationSpec, QuantSpec
from ...support.arguments import check_choice, check_number, show
from ...support.errors import ArgumentTypeError
from ..granularity import Granularity, MappingType
from ..parameters import Site
from ..scheme import Scheme

_FLOAT_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float4_e2m1fn_x2: E2M1}
AnyDtype = torch.dtype | Format | str


def as_format(dtype: AnyDtype, owner: str = "") -> Format:
    """A Format from a torch dtype (torch.int4, torch.float8_e4m3fn), a name, or a Format.

    Raises ValueError with similar names, ArgumentTypeError for something else; ``owner`` goes before the message.
    """
    if isinstance(dtype, Format):
        return dtype
    if isinstance(dtype, torch.dtype):
        if dtype in _FLOAT_FORMATS:
            return _FLOAT_FORMATS[dtype]
        dtype = str(dtype).removeprefix("torch.")
    try:
        return get_format(dtype)
    except ValueError as error:
        raise type(error)(f"{owner}: {error}" if owner else str(error)) from None


class AOBaseConfig(CheckedFields):
    """Base of configs: frozen dataclasses that map a site to its scheme (:meth:`scheme`).

    A config of your own may have a handler instead, see :func:`pennyweight.register_quantize_module_handler`.
    """

    # Version of the fields in files; a config that changes its fields has a field ``version`` (older torchao: VERSION)
    version = 1
    VERSION = 1
    # (config -> plain data, plain data -> config): filled by serialize.py, which knows all configs
    coder: ClassVar[list[Any]] = []
    # The class that carries out quantize_ for this config, in place of quantize.pipeline.Pipeline
    pipeline: ClassVar[Any] = None

    @property
    def quant_method(self) -> str:
        """Read by transformers from its own configs. Raises ArgumentTypeError."""
        raise ArgumentTypeError(
            f"from_pretrained takes quantization_config=pw.PennyweightConfig({self}), got {type(self).__name__} itself"
        )

    def __str__(self) -> str:
        """The call that makes this config, without the fields at their defaults."""
        given = []
        for f in fields(self) if is_dataclass(self) else ():  # type: ignore[var-annotated]
            value = getattr(self, f.name)
            default: Any = f.default if f.default_factory is MISSING else f.default_factory()
            if value != default:
                given.append(f"{f.name}={value!r}" if isinstance(value, str) else f"{f.name}={value}")
        return f"{type(self).__name__}({', '.join(given)})"

    def to_json(self, indent: int | None = 2) -> str:
        """The config as JSON, which :meth:`from_json` and ``--config FILE`` read. Raises ValueError for a config of
        another library."""
        return json.dumps(self.coder[0](self), indent=indent)

    @staticmethod
    def from_json(text: str) -> AOBaseConfig:
        """Inverse of :meth:`to_json`. Raises ValueError for anything unknown, of a wrong type or out of range."""
        if not isinstance(text, (str, bytes, bytearray)):
            raise ArgumentTypeError(f"from_json takes the text that to_json returns, got {show(text)}")
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the config is not JSON: {error}; pass the text that to_json returns") from error
        config: AOBaseConfig = AOBaseConfig.coder[1](data)
        return config

    def site(self, site: Site) -> Site:
        """The site, possibly with another contracted axis (see ContractedAxis)."""
        return site

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        """The scheme of a site. Raises ValueError with the site's name if the config does not fit it."""
        raise ValueError(
            f"{type(self).__name__} has neither scheme() nor a handler; "
            "register one with @register_quantize_module_handler"
        )


@dataclass(frozen=True)
class SpecConfig(AOBaseConfig):
    """A custom scheme: ``SpecConfig(QuantSpec(INT4, (32,)))``. The spec is used unchanged."""

    weight: QuantSpec
    act: ActivationSpec | None = None
    rule: str | None = None
    eps: float | None = None
    act_scale: float | None = None
    act_zero_point: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, QuantSpec):
            raise ArgumentTypeError(
                f"SpecConfig needs a QuantSpec such as QuantSpec(get_format('int4'), (32,)), got {show(self.weight)}"
            )
        if self.act is not None and not isinstance(self.act, ActivationSpec):
            raise ArgumentTypeError(
                "SpecConfig: act must be an ActivationSpec such as ActivationSpec(QuantSpec(get_format('int8'), (-1,)))"
                f", got {show(self.act)}"
            )
        if self.rule is not None:
            check_choice("SpecConfig: rule", self.rule, sorted(RULES))
        self._scheme()

    def _scheme(self) -> Scheme:
        return Scheme(self.weight, self.act, self.rule, self.eps, self.act_scale, self.act_zero_point)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return self._scheme()


def activation(
    fmt: Format, site: Site, granularity: Granularity, mapping: MappingType = MappingType.SYMMETRIC, *,
    mode: str = "dynamic", eps: float | None = None, scale: torch.dtype = torch.float32,
) -> ActivationSpec:  # fmt: skip
    """Integer activations in blocks of that granularity."""
    if mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        raise ValueError("the mapping type of activations must be SYMMETRIC or ASYMMETRIC")
    spec = QuantSpec(fmt, site.activation_block(granularity), scale, zero_point=mapping is MappingType.ASYMMETRIC)
    return ActivationSpec(spec, mode, None, eps)


def pair(granularity: Any) -> tuple[Granularity, Granularity]:
    """(activation, weight) granularity from one or two."""
    both = tuple(granularity) if isinstance(granularity, (tuple, list)) else (granularity, granularity)
    if len(both) != 2 or not all(isinstance(g, Granularity) for g in both):
        raise ArgumentTypeError(
            f"granularity must be one such as PerRow() or PerGroup(64), or a pair (activation, weight) of these, got "
            f"{show(granularity)}{_as_granularity(granularity)}"
        )
    return both


def _as_granularity(value: Any) -> str:
    """The remedy for a value that stands for a granularity."""
    if isinstance(value, type) and issubclass(value, Granularity):
        return f"; call the class: {value.__name__}()"
    return f"; write PerGroup({value})" if type(value) is int and value > 0 else ""


def number(owner: str, name: str, value: Any) -> Any:
    """A positive number from itself or a tensor of one element. Raises ValueError with the remedy."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{owner}: {name} must be one number for the whole input, got shape {tuple(value.shape)}; "
                "a scale per row would fit only one batch size; use the largest scale, or a dynamic config"
            )
        value = value.item()
    if value is None or value == float("inf"):
        raise ValueError(
            f"{owner}: {name} must be a positive number, got {value}; pw.calibrate(model, batches, {owner}) finds it "
            "for each layer"
        )
    check_number(f"{owner}: {name}", value, positive=True)
    return value


def require_signed_int(owner: str, dtype: AnyDtype) -> None:
    fmt = as_format(dtype, f"{owner}: weight_dtype")
    if fmt.kind != "int" or fmt.lo >= 0 or fmt is TERNARY:
        raise ValueError(f"{owner}: weight_dtype must be int1 to int8, got {fmt}")


def require_float8(owner: str, *dtypes: AnyDtype) -> None:
    for dtype in dtypes:
        if as_format(dtype, owner) not in (E4M3, E5M2):
            raise ValueError(f"{owner}: dtypes must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")


def intx(
    dtype: AnyDtype, granularity: Granularity, mapping: MappingType, scale: torch.dtype | None, site: Site, policy: str
) -> QuantSpec:
    """Integer weights; ``scale`` None: in the dtype of the weight."""
    fmt = as_format(dtype)
    zero_point = fmt if mapping is MappingType.ASYMMETRIC else False
    return QuantSpec(fmt, site.block(granularity, policy), scale or site.dtype, zero_point=zero_point)
