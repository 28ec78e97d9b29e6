"""transformers: ``quantization_config=PennyweightConfig("int4")``, and folders of ours in ``from_pretrained``.

Importing this module registers the method "pennyweight"; transformers finds no third party by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..io.manifest import VERSION
from ..io.side_files import METHOD, quantization_config
from ..models.configs import AOBaseConfig
from ..models.configs.names import by_name
from ..models.configs.plain_data import config_from_data
from ..models.plan import ON_INDIVISIBLE
from .transformers_folder import attach_quantizer, load_pretrained
from .transformers_quantizer import PennyweightQuantizer

__all__ = ["PennyweightConfig", "PennyweightQuantizer", "attach_quantizer", "load_pretrained"]


class PennyweightConfig(QuantizationConfigMixin):
    """Quantize while loading: ``from_pretrained(folder, quantization_config=PennyweightConfig("int4"))``.

    config                  one of our configs, or its name on the command line ("int4", "int8-dynamic"); FqnToConfig
                            for layers by name
    modules_to_not_convert  names (or patterns, as transformers has them) of modules that stay float. Default: the
                            output layer and tied weights; [] is none. A layer that FqnToConfig names is quantized
    on_indivisible          as for ``pw.quantize_``

    Also what "quantization_config" of config.json says of files that are quantized already: there the weights speak
    for themselves, and ``config`` (None for one of somebody's own) only tells how they came about.
    """

    def __init__(
        self,
        config: AOBaseConfig | str | dict[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        on_indivisible: str = "pad",
        *,
        quant_method: str = METHOD,
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(
                f"quant_method is {quant_method!r}, not {METHOD!r}: another library's files. Where we read them, "
                "pennyweight.integrations.transformers.load_pretrained(AutoModelForCausalLM, folder) loads it"
            )
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(f"quantization_config has version {version!r}; this release reads {VERSION}; upgrade it")
        if unknown:
            raise ValueError(f"quantization_config has {sorted(unknown)}, which this release does not know; upgrade it")
        if on_indivisible not in ON_INDIVISIBLE:
            raise ValueError(f"on_indivisible must be one of {ON_INDIVISIBLE}, got {on_indivisible!r}")
        if isinstance(modules_to_not_convert, str) or not all(isinstance(n, str) for n in modules_to_not_convert or ()):
            raise ValueError(f"modules_to_not_convert must be a list of names, got {modules_to_not_convert!r}")
        if isinstance(config, str):
            config = by_name(config)
        elif isinstance(config, dict):
            config = config_from_data(config)
        elif config is not None and not isinstance(config, AOBaseConfig):
            raise ValueError(
                f'config must be one such as Int8WeightOnlyConfig(), or a name such as "int8"; got {config!r}'
            )
        self.quant_method = METHOD
        self.config = config
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.on_indivisible = on_indivisible

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json."""
        out = quantization_config(self.config, self.modules_to_not_convert)
        return out if self.on_indivisible == "pad" else {**out, "on_indivisible": self.on_indivisible}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


def _register() -> None:
    """Once: a module that is imported anew (importlib.reload) takes the place of its older self."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(PennyweightConfig)
    auto.register_quantizer(METHOD)(PennyweightQuantizer)


_register()
