"""Configs that wrap other configs: by layer name, or for another contracted axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ...support.arguments import show
from ...support.errors import ArgumentTypeError
from ..parameters import Site
from ..scheme import Scheme
from .base import AOBaseConfig
from .by_name import named


@dataclass(frozen=True, eq=False)
class FqnToConfig(AOBaseConfig):
    """Maps names to configs. Exact parameter names are tried first, then exact module names, then patterns in their
    order; the first match wins.

    Keys match a module or a parameter: an exact name, a glob (``layers.*.mlp``), or ``re:`` and a regular expression
    that must match the whole name; in configs from files without look-arounds and back references. Parameters of a
    module that is no registered site (experts) are selected by their own names, such as ``*.experts.*``. A value of
    None leaves the match unquantized; a string is the short name of a config ("int8", "int4:64"). ``_default`` applies
    to linear modules that no key matches, ``_embeddings`` to embeddings that no key matches, and to output layers tied
    to them.

    notes   remarks by key for the report, such as those of :func:`pennyweight.calibrate`; not stored in files
    """

    notes: ClassVar[Mapping[str, str]] = MappingProxyType({})

    fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    version: int = 1

    if TYPE_CHECKING:  # what is passed may be short names; what is held are configs

        def __init__(
            self,
            fqn_to_config: Mapping[str, AOBaseConfig | str | None] = ...,
            module_fqn_to_config: Mapping[str, AOBaseConfig | str | None] = ...,
            version: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.fqn_to_config and self.module_fqn_to_config and self.fqn_to_config != self.module_fqn_to_config:
            raise ValueError("give fqn_to_config or its older name module_fqn_to_config, not both")
        given = self.fqn_to_config or self.module_fqn_to_config
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(
                f"FqnToConfig takes a mapping from names to configs, {{'lm_head': pw.Int8WeightOnlyConfig()}}, got "
                f"{show(given)}"
            )
        table = {key: _named(key, value) for key, value in given.items()}
        for key, value in table.items():
            if not isinstance(key, str) or not (value is None or isinstance(value, AOBaseConfig)):
                call = f"; call the class: {value.__name__}()" if isinstance(value, type) else ""
                raise ArgumentTypeError(
                    f"FqnToConfig maps names to configs or None, got {key!r}: {show(value)}{call or _NAMES}"
                )
            if isinstance(value, FqnToConfig):
                raise ValueError(f"FqnToConfig cannot contain another FqnToConfig ({key!r}); merge the keys into one")
        object.__setattr__(self, "fqn_to_config", table)
        object.__setattr__(self, "module_fqn_to_config", table)

    def __eq__(self, other: object) -> bool:  # the order of the keys counts: the first match wins
        return isinstance(other, FqnToConfig) and [*self.fqn_to_config.items()] == [*other.fqn_to_config.items()]

    def with_notes(self, notes: Mapping[str, str]) -> FqnToConfig:
        """The same config with remarks by key."""
        new = replace(self)
        object.__setattr__(new, "notes", dict(notes))
        return new

    def __hash__(self) -> int:
        return hash(tuple(self.fqn_to_config.items()))

    def __str__(self) -> str:
        return f"FqnToConfig({{{', '.join(f'{k!r}: {v}' for k, v in self.fqn_to_config.items())}}})"


_NAMES = '; a key is a name such as "lm_head" or "*.down_proj", a value a config such as "int8" or None'


def _named(key: object, value: Any) -> Any:
    """The config of a value; its errors name the key."""
    try:
        return named(value)
    except ValueError as error:
        raise type(error)(f"{key}: {error}") from None


@dataclass(frozen=True)
class ContractedAxis(AOBaseConfig):
    """``config`` for a bare parameter that is contracted along ``axis``, -1 or -2.

    Experts used as ``torch.bmm(x, w)`` with w [E, K, N] are contracted along axis -2: without this, blocks would run
    along the outputs and no kernel would support them.
    """

    config: AOBaseConfig
    axis: int = -2

    def __post_init__(self) -> None:
        if not isinstance(self.config, AOBaseConfig):
            raise ArgumentTypeError(
                f"ContractedAxis wraps a config such as Int8WeightOnlyConfig(), got {show(self.config)}"
            )
        if self.axis not in (-1, -2):
            raise ValueError(f"ContractedAxis: axis must be -1 or -2, got {self.axis}")

    def site(self, site: Site) -> Site:
        if site.transposed == (self.axis == -2):
            return site
        if not site.bare:
            raise ValueError(
                f"ContractedAxis({self.axis}): {site.type_name} is contracted along the other axis; pass the inner "
                "config directly"
            )
        return replace(site, transposed=not site.transposed, shape=(*site.shape[:-2], site.shape[-1], site.shape[-2]))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return self.config.scheme(site, on_indivisible)
