"""transformers: ``quantization_config=PennyweightConfig("int4")``, and our folders in ``from_pretrained``; loading of
other folders, and saving of models quantized by hand.

Importing this module registers the method "pennyweight"; so does ``import pennyweight``, see transformers_entry.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig
from transformers.utils import PushToHubMixin
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..io.atomic_write import write_bytes
from ..io.config_files import METHOD, NO_SUCH_FILE, WEIGHTS_KEY, quantization_config
from ..io.hub import is_hub_id, uploaded_card
from ..io.loading import load
from ..io.manifest import VERSION
from ..io.model_card import CARD, MAX_CARD_BYTES, is_generated
from ..io.output_formats import FORMATS
from ..io.state_dict import slots_of
from ..io.strict_json import read_bytes
from ..planning.config_resolution import not_a_config
from ..planning.configs import AOBaseConfig
from ..planning.configs.aliases import algorithm_of, by_name
from ..planning.configs.files import is_config_file, read_config
from ..planning.configs.serialize import config_from_data
from ..planning.plan import ON_INDIVISIBLE
from ..support.arguments import check_names, check_nothing, did_you_mean, show
from ..support.errors import ArgumentTypeError
from .transformers_quantizer import PennyweightQuantizer

__all__ = ["PennyweightConfig", "PennyweightQuantizer", "attach_quantizer", "load_pretrained"]


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


# transformers' own card for a model without one; its text has no other mark
_TEMPLATE = "This model card has been automatically generated"


def _write_cards_of_uploads() -> None:
    """Upload our model card with a quantized model, instead of the empty one that ``push_to_hub`` generates.

    Patches the method that uploads the files of a saved model: transformers has no hook for it.
    """
    plain: Any = getattr(PushToHubMixin, "_upload_modified_files", None)
    plain = getattr(plain, "__wrapped__", plain)
    if plain is None:  # a release that uploads otherwise
        return

    @functools.wraps(plain)
    def upload(self: Any, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        path, quantizer = os.path.join(working_dir, CARD), getattr(self, "hf_quantizer", None)
        if isinstance(quantizer, PennyweightQuantizer) and os.path.isfile(path):
            text = read_bytes(path, MAX_CARD_BYTES)
            if is_generated(text) or _TEMPLATE.encode() in text:
                loaded = quantizer.pre_quantized and not isinstance(quantizer, InPlaceQuantizer)
                name = "" if loaded else getattr(self.config, "name_or_path", "")
                base = name if is_hub_id(name) and not os.path.exists(name) else ""
                report = getattr(quantizer, "report", None)
                write_bytes(path, uploaded_card(working_dir, repo_id, text, base=base, report=report))
        return plain(self, working_dir, repo_id, *args, **kwargs)

    PushToHubMixin._upload_modified_files = upload


register()
_mark_written_configs()
_write_cards_of_uploads()


# -- any folder that pw.load reads -------------------------------------------------------------------------------------


@check_arguments(dtype=check_nothing)
def load_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """The model of config.json, with weights read by ``pw.load``: quantized ones stay quantized.

    model_class     an Auto class such as AutoModelForCausalLM, or a class such as LlamaForCausalLM
    dtype           of the parameters; default: as stored in the files
    device, strict  as for ``pw.load``
    config          instead of config.json
    kwargs          passed to the model constructor: attn_implementation etc.

    For files whose "quantization_config" transformers would pass to another library, or not read at all. The model can
    be saved by ``save_pretrained``, in our format. Raises the errors of ``pw.load`` and AutoConfig.
    """
    from transformers import AutoConfig, GenerationConfig

    folder = os.fspath(folder)
    config = AutoConfig.from_pretrained(folder) if config is None else config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.name_or_path = folder
    if dtype is not None:
        kwargs["dtype"] = dtype
    if not hasattr(model_class, "from_config") and not hasattr(model_class, "_from_config"):
        raise ArgumentTypeError(
            f"model_class must be a class of transformers such as AutoModelForCausalLM, got {show(model_class)}"
        )
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with _parameters_on_meta():
        model = make(config, **kwargs)
    made = model.dtype
    load(folder, model, strict=strict, device=device)
    if dtype is not None:
        _cast(model, made)
    if device is not None:
        model.to(device)
    if model.can_generate() and os.path.isfile(os.path.join(folder, "generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if any(isinstance(p, AffineQuantizedTensor) for p in model.parameters()):
        attach_quantizer(model)
    return model.eval()


def attach_quantizer(model: Any, config: AOBaseConfig | str | None = None, *, save_as: str = "pennyweight") -> Any:
    """Enable ``save_pretrained`` and ``dequantize`` of a transformers model quantized with ``pw.quantize_``.

    config: the config used, for config.json. save_as: as for PennyweightConfig. Returns the model.
    """
    quantizer = PennyweightQuantizer(PennyweightConfig(config, save_as=save_as), pre_quantized=True)
    model.is_quantized, model.quantization_method = True, quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: buffers such as position frequencies are computed in float32 and stay so."""
    new: dict[int, nn.Parameter] = {}
    for slot in slots_of(model).values():
        old = slot.tensor
        if slot.is_param and old.is_floating_point() and old.dtype != dtype:
            if id(old) not in new:
                new[id(old)] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
            slot.module._parameters[slot.attr] = new[id(old)]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules created inside have no weights; their buffers are real, since files do not contain non-persistent
    ones."""

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:  # unchanged: a tied one must stay the same object
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


# -- models quantized in place: save_pretrained writes them like models quantized on load ------------------------------


def settle_(model: Any, quantized: bool, config: Any = None) -> None:
    """Attach the quantizer that ``save_pretrained`` needs, or remove it if nothing is quantized any more.

    config: the config used for quantizing, for config.json. Another library's quantizer is kept, and so is one of ours
    that loaded the model.
    """
    held = getattr(model, "hf_quantizer", None)
    if quantized and held is None:
        model.hf_quantizer = InPlaceQuantizer(PennyweightConfig(config if isinstance(config, AOBaseConfig) else None))
    elif quantized and isinstance(held, InPlaceQuantizer) and held.quantization_config.config != config:
        save_as = held.quantization_config.save_as
        held.quantization_config = PennyweightConfig(save_as=save_as)  # quantized with several configs
    elif not quantized and isinstance(held, PennyweightQuantizer):
        held.remove_quantization_config(model)


class InPlaceQuantizer(PennyweightQuantizer):
    """Affects only how the model is saved, and only while it has quantized weights."""

    conversions: Any = None  # the model's own; not undone when quantized weights are saved

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)
        if not any(isinstance(t, AffineQuantizedTensor) for t in model.state_dict().values()):
            self.remove_quantization_config(model)
            return None, {}
        if self.conversions is None:
            self.conversions = getattr(model, "_weight_conversions", None)
        self.postprocess_model(model)
        return super().get_state_dict_and_metadata(model)

    def remove_quantization_config(self, model: Any) -> None:
        super().remove_quantization_config(model)
        if self.conversions is not None:
            model._weight_conversions = self.conversions
