"""Configs that say where another config applies: by name, or along another axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..parameters import Site
from ..scheme import Scheme
from .base import AOBaseConfig


@dataclass(frozen=True, eq=False)
class FqnToConfig(AOBaseConfig):
    """Which config for which parameter: exact parameter names first, then exact module names, then patterns in their
    order; the first match wins.

    Keys name a module or a parameter: exact, a glob (``layers.*.mlp``), or ``re:`` and a regular expression that must
    match the whole name; in configs out of files one without look-arounds and back references. Parameters of a module
    without a site of its own (experts) are reached by their own names, as by ``*.experts.*``. A value of None leaves it
    alone. ``_default`` is for the modules that no key names.
    """

    fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        if self.fqn_to_config and self.module_fqn_to_config and self.fqn_to_config != self.module_fqn_to_config:
            raise ValueError("give fqn_to_config or its older name module_fqn_to_config, not both")
        table = dict(self.fqn_to_config or self.module_fqn_to_config)
        for key, value in table.items():
            if not isinstance(key, str) or not (value is None or isinstance(value, AOBaseConfig)):
                raise ValueError(f"FqnToConfig maps names to configs or None, got {key!r}: {value!r}")
            if isinstance(value, FqnToConfig):
                raise ValueError(
                    f"FqnToConfig cannot hold another one, as {key!r} does; put its keys beside the others"
                )
        object.__setattr__(self, "fqn_to_config", table)
        object.__setattr__(self, "module_fqn_to_config", table)

    def __eq__(self, other: object) -> bool:  # the order of the keys counts: the first match wins
        return isinstance(other, FqnToConfig) and [*self.fqn_to_config.items()] == [*other.fqn_to_config.items()]

    def __hash__(self) -> int:
        return hash(tuple(self.fqn_to_config.items()))

    def __str__(self) -> str:
        return f"FqnToConfig({{{', '.join(f'{k!r}: {v}' for k, v in self.fqn_to_config.items())}}})"


ModuleFqnToConfig = FqnToConfig
AOPerModuleConfig = FqnToConfig


@dataclass(frozen=True)
class ContractedAxis(AOBaseConfig):
    """``config`` for a bare parameter whose products sum over ``axis``, -1 or -2.

    Experts used as ``torch.bmm(x, w)`` with w [E, K, N] sum over axis -2: without this, blocks would run along the
    outputs and no kernel could take them.
    """

    config: AOBaseConfig
    axis: int = -2

    def __post_init__(self) -> None:
        if not isinstance(self.config, AOBaseConfig):
            raise ValueError(f"ContractedAxis wraps a config such as Int8WeightOnlyConfig(), got {self.config!r}")
        if self.axis not in (-1, -2):
            raise ValueError(f"ContractedAxis: axis must be -1 or -2, got {self.axis}")

    def site(self, site: Site) -> Site:
        if site.transposed == (self.axis == -2):
            return site
        if not site.bare:
            raise ValueError(
                f"ContractedAxis({self.axis}): products of {site.type_name} sum over the other axis; give its config"
            )
        return replace(site, transposed=not site.transposed, shape=(*site.shape[:-2], site.shape[-1], site.shape[-2]))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return self.config.scheme(site, on_indivisible)
