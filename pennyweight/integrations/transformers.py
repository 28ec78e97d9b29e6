"""transformers: ``quantization_config=PennyweightConfig("int4")``, and our folders in ``from_pretrained``.

Importing this module registers the method "pennyweight"; so does ``import pennyweight``, see transformers_entry.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..io.config_files import METHOD, NO_SUCH_FILE, WEIGHTS_KEY, quantization_config
from ..io.manifest import VERSION
from ..io.output_formats import FORMATS
from ..planning.configs import AOBaseConfig
from ..planning.configs.aliases import by_name
from ..planning.configs.serialize import config_from_data
from ..planning.plan import ON_INDIVISIBLE
from .transformers_folder import attach_quantizer, load_pretrained
from .transformers_quantizer import PennyweightQuantizer

__all__ = ["PennyweightConfig", "PennyweightQuantizer", "attach_quantizer", "load_pretrained"]


class PennyweightConfig(QuantizationConfigMixin):
    """Quantize while loading: ``from_pretrained(folder, quantization_config=PennyweightConfig("int4"))``.

    config                  one of our configs, or its short name ("int4", "int8-dynamic"); FqnToConfig for layers by
                            name
    group_size              of a config given by its short name
    skip                    modules and parameters that stay float, as for ``pw.quantize_``: names, ends of names, globs
    modules_to_not_convert  names (or patterns, as in transformers) of modules that stay float. Default: the output
                            layer and tied weights; [] is none. A layer named in FqnToConfig is always quantized
    on_indivisible          as for ``pw.quantize_``
    save_as                 what ``save_pretrained`` writes: "pennyweight", or "compressed-tensors", which transformers
                            reads without this package; CheckpointError if that cannot represent the weights exactly

    Also represents "quantization_config" in config.json of quantized files: there the weights describe themselves, and
    ``config`` (None for a user-defined one) only records how they were quantized.
    """

    def __init__(
        self,
        config: AOBaseConfig | str | dict[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        on_indivisible: str = "pad",
        *,
        group_size: int | None = None,
        skip: Sequence[str] = (),
        save_as: str = METHOD,
        quant_method: str = METHOD,
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(
                f"quant_method is {quant_method!r}, not {METHOD!r}: another library's files. If they are supported, "
                "pennyweight.integrations.transformers.load_pretrained(AutoModelForCausalLM, folder) loads them"
            )
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(f"quantization_config has version {version!r}; this release reads {VERSION}; upgrade it")
        if unknown:
            raise ValueError(f"quantization_config has {sorted(unknown)}, which this release does not know; upgrade it")
        if on_indivisible not in ON_INDIVISIBLE:
            raise ValueError(f"on_indivisible must be one of {ON_INDIVISIBLE}, got {on_indivisible!r}")
        if save_as not in (METHOD, *FORMATS):
            raise ValueError(f"save_as must be one of {(METHOD, *FORMATS)}, got {save_as!r}")
        if isinstance(modules_to_not_convert, str) or not all(isinstance(n, str) for n in modules_to_not_convert or ()):
            raise ValueError(f"modules_to_not_convert must be a list of names, got {modules_to_not_convert!r}")
        if isinstance(skip, str) or not all(isinstance(n, str) for n in skip):
            raise ValueError(f"skip must be a list of names, got {skip!r}")
        if group_size is not None and not isinstance(config, str):
            raise ValueError('group_size needs a config given by its short name, such as "int4"; set it in the config')
        if isinstance(config, str):
            config = by_name(config, group_size)
        elif isinstance(config, dict):
            config = config_from_data(config)
        elif config is not None and not isinstance(config, AOBaseConfig):
            raise ValueError(
                f'config must be one such as Int8WeightOnlyConfig(), or a name such as "int8"; got {config!r}'
            )
        self.quant_method = METHOD
        self.config = config
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.skip = list(skip)
        self.on_indivisible = on_indivisible
        self.save_as = save_as
        self.written: dict[str, Any] | None = None  # the entry when saving in another library's format

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json."""
        if self.written is not None:
            return self.written
        out = quantization_config(self.config, self.modules_to_not_convert)
        out |= {"skip": self.skip} if self.skip else {}
        return out if self.on_indivisible == "pad" else {**out, "on_indivisible": self.on_indivisible}

    def quantize_arguments(self) -> dict[str, Any]:
        """The arguments of ``pw.quantize_`` that this object stands for."""
        skip = [*self.skip, *(self.modules_to_not_convert or ())]
        return {"config": self.config, "skip": skip, "on_indivisible": self.on_indivisible}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


def register() -> None:
    """Register both classes with transformers. A re-imported module replaces its older version."""
    from transformers.quantizers import auto

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(PennyweightConfig)
    auto.register_quantizer(METHOD)(PennyweightQuantizer)


def _mark_written_configs() -> None:
    """Mark config.json of a model with our weights for processes that do not know METHOD: see NO_SUCH_FILE.

    Patches the method with which PreTrainedConfig.save_pretrained creates the file, before weights are written or
    uploaded: transformers has no hook for it.
    """
    plain: Any = getattr(PreTrainedConfig.to_diff_dict, "__wrapped__", PreTrainedConfig.to_diff_dict)

    @functools.wraps(plain)
    def to_diff_dict(self: Any) -> dict[str, Any]:
        out = plain(self)
        if (out.get("quantization_config") or {}).get("quant_method") == METHOD:
            out[WEIGHTS_KEY] = NO_SUCH_FILE
        return out

    PreTrainedConfig.to_diff_dict = to_diff_dict  # type: ignore[method-assign]


register()
_mark_written_configs()
