"""The config of ``from_pretrained(folder, quantization_config=PennyweightConfig("int4"))``, and of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ...io.config_files import METHOD, quantization_config
from ...io.manifest import VERSION
from ...io.output_formats import FORMATS
from ...planning.config_resolution import not_a_config
from ...planning.configs import AOBaseConfig
from ...planning.configs.by_name import algorithm_of, by_name
from ...planning.configs.files import is_config_file, read_config
from ...planning.configs.serialize import config_from_data
from ...planning.plan import ON_INDIVISIBLE
from ...support.arguments import check_names, did_you_mean, show
from ...support.errors import ArgumentTypeError


class PennyweightConfig(QuantizationConfigMixin):
    """Quantize while loading: ``from_pretrained(folder, quantization_config=PennyweightConfig("int4"))``.

    config                  one of our configs, its short name ("int4", "int8-dynamic") or the path of its file;
                            FqnToConfig for layers by name
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
        quant_method: str = "",
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        if unknown and not quant_method:  # which config.json always has
            known = ("config", "group_size", "skip", "modules_to_not_convert", "on_indivisible", "save_as")
            name = min(unknown)
            raise TypeError(
                f"PennyweightConfig has no argument {name!r}{did_you_mean(name, known, 1)}; it takes {', '.join(known)}"
            )
        if quant_method not in ("", METHOD):
            raise ValueError(
                f"quant_method is {quant_method!r}, not {METHOD!r}: another library's files. If they are supported, "
                "pennyweight.integrations.transformers.load_pretrained(AutoModelForCausalLM, folder) loads them"
            )
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(f"quantization_config has version {version!r}; this release reads {VERSION}; upgrade it")
        if unknown:
            raise ValueError(f"quantization_config has {sorted(unknown)}, which this release does not know; upgrade it")
        if on_indivisible not in ON_INDIVISIBLE:
            guess = did_you_mean(on_indivisible, ON_INDIVISIBLE, 1)
            known = ", ".join(ON_INDIVISIBLE)
            raise ValueError(f"on_indivisible must be one of {known}, got {on_indivisible!r}{guess}")
        if save_as not in (METHOD, *FORMATS):
            guess = did_you_mean(save_as, (METHOD, *FORMATS), 1)
            raise ValueError(f"save_as must be one of {', '.join((METHOD, *FORMATS))}, got {save_as!r}{guess}")
        if modules_to_not_convert is not None:
            check_names("modules_to_not_convert", modules_to_not_convert)
        check_names("skip", skip)
        if group_size is not None and not isinstance(config, str):
            where = f", got config={show(config)}; set the group size in it" if config is not None else ""
            raise ValueError(
                'group_size needs a config given by its short name, such as PennyweightConfig("int4", group_size=64)'
                + where
            )
        if isinstance(config, str):
            if algorithm_of(config):
                raise ValueError(
                    f"{config} stands for the algorithm {algorithm_of(config)}, which needs calibration data; load the "
                    "model and call pw.quantize_(model, config, calibration=...)"
                )
            config = read_config(config) if is_config_file(config) else by_name(config, group_size)
        elif isinstance(config, dict):
            config = config_from_data(config)
        elif config is not None and not isinstance(config, AOBaseConfig):
            raise ArgumentTypeError(not_a_config("config", config))
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
