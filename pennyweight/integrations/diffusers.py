"""diffusers: ``save_pretrained`` of models quantized in place, and ``from_pretrained`` of the saved folders.

Importing this module registers the method "pennyweight"; diffusers does not discover third-party methods itself.
Quantizing while loading is not supported: call ``pw.quantize_`` after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..io.checkpoint import open_files
from ..io.config_files import METHOD, quantization_config
from ..io.lazy_checkpoint import open_safetensors
from ..io.manifest import VERSION
from ..io.state_dict import Slot, flatten, slots_of
from ..kernels.repack import prepare
from ..planning.configs import AOBaseConfig
from ..quantize.dequantize import dequantize_


class Method(StrEnum):
    """diffusers expects the method name as an enum."""

    PENNYWEIGHT = METHOD


class DiffusersConfig(QuantizationConfigMixin):
    """ "quantization_config" of a model's config.json: identifies the format. The weights describe themselves.

    config: the config they were quantized with, one of ours or plain data; None if unknown.
    """

    def __init__(
        self,
        config: AOBaseConfig | dict[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        *,
        quant_method: str = METHOD,
        version: int = VERSION,
        **unknown: Any,
    ) -> None:
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(f"quantization_config has version {version!r}; this release reads {VERSION}; upgrade it")
        if quant_method != METHOD or unknown:
            raise ValueError(f"quantization_config of {quant_method!r} has {sorted(unknown)}, unknown to this release")
        self.quant_method = Method.PENNYWEIGHT
        self.config = config
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        ours = self.config if isinstance(self.config, AOBaseConfig) else None
        out = quantization_config(ours, self.modules_to_not_convert)
        return out if ours is not None else {**out, "config": self.config}

    to_diff_dict = to_dict  # printed by the base class


class DiffusersPennyweightQuantizer(DiffusersQuantizer):
    """Created by diffusers for a folder with method "pennyweight", and by :func:`settle_`."""

    def __init__(self, quantization_config: DiffusersConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._read: dict[str, Tensor] | None = None  # None: a pickle, which contains the tensors directly
        self._slots: dict[str, Slot] = {}
        self._made: dict[Any, nn.Parameter] = {}  # by address, so that tied weights stay tied

    # -- writing -----------------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return flatten(state_dict) if safe_serialization else (state_dict, {})

    # -- reading -----------------------------------------------------------------------------------------------------

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "pennyweight does not quantize diffusers models while they load; call pw.quantize_ after it"
            )
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("quantized weights cannot be offloaded to disk; place all modules on a device or the CPU")

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Replace the names of stored parts by weight names; all tensors are read and checked here."""
        paths = [str(p) for p in checkpoint_files]
        if not all(p.endswith(".safetensors") for p in paths):
            return loaded_keys  # pickled whole
        with open_files(paths) as checkpoint:
            self._read = open_safetensors(checkpoint, None, {}, None).state_dict()
        return list(self._read)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All tensors in place of the parts for the first file, none for the other files: the parts of one weight may
        be stored in several files."""
        if self._read is None:
            return state_dict
        out, self._read = self._read, {}
        return out

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self._slots = slots_of(model)

    def check_if_quantized_param(self, model: Any, param_value: Tensor, *args: Any, **kwargs: Any) -> bool:
        return isinstance(param_value, AffineQuantizedTensor)

    def create_quantized_param(
        self,
        model: Any,
        param_value: Any,
        param_name: str,
        target_device: torch.device | str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        slot, at = self._slots[param_name], param_value.data_ptr()
        if at not in self._made:
            w = param_value.to(target_device)
            self._made[at] = nn.Parameter(prepare(w, (slot.op,)) if w.ndim > 1 else w, requires_grad=False)
        slot.module._parameters[slot.attr] = self._made[at]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self._read, self._slots, self._made = None, {}, {}

    # -- capabilities ----------------------------------------------------------------------------------------------

    def dequantize(self, model: nn.Module) -> nn.Module:
        dequantize_(model)  # calls settle_ at the end
        return model

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def supports_parallel_loading(self) -> bool:
        return False


def settle_(model: Any, quantized: bool, config: Any = None) -> None:
    """Attach the quantizer that ``save_pretrained`` needs, or remove it if nothing is quantized any more.

    config: the config used for quantizing, for config.json. Another library's quantizer is kept.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantized and quantizer is None:
        asked = DiffusersConfig(config if isinstance(config, AOBaseConfig) else None)
        model.hf_quantizer = DiffusersPennyweightQuantizer(asked)
        model.register_to_config(quantization_config=asked)
    elif (
        quantized
        and isinstance(quantizer, DiffusersPennyweightQuantizer)
        and quantizer.quantization_config.config != config
    ):
        quantizer.quantization_config = DiffusersConfig()  # quantized with several configs
        model.register_to_config(quantization_config=quantizer.quantization_config)
    elif not quantized and isinstance(quantizer, DiffusersPennyweightQuantizer):
        del model.hf_quantizer
        model.is_quantized = False
        kept = {k: v for k, v in model.config.items() if k != "quantization_config"}
        model._internal_dict = FrozenDict(kept)


def register() -> None:
    """Register the method with diffusers."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = DiffusersConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = DiffusersPennyweightQuantizer


register()
