"""The quantization config that vLLM asks for each layer's method."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from ...planning.configs import AOBaseConfig
from ...planning.configs.by_name import CONFIGS, algorithm_of, by_name
from ...planning.configs.files import read_config
from ...planning.configs.serialize import config_from_data

METHOD = "pennyweight"
VERSION = 1  # of the entry in config.json


class PennyweightVllmConfig(QuantizationConfig):
    """How a model's weights are quantized, for vLLM.

    config  None: the checkpoint's weights are quantized. Else the config that quantizes its float weights while they
            are loaded, as :func:`pennyweight.quantize_checkpoint` would
    skip    names of modules that stay float, as for ``pw.quantize_``
    quantized  whether the checkpoint is

    From Python, with any config: ``LLM(folder, quantization="pennyweight", hf_overrides={"quantization_config":
    {"quant_method": "pennyweight", "config": "int4", "skip": ["lm_head"]}})``; "config" is a short name, or the data
    of a config. ``hf_overrides={"quantization_config_file": "config.yaml"}`` reads a file as for ``pennyweight quantize
    --config``.

    Raises ValueError on a device other than the CPU, because our kernels run on CPUs only, and for a float model
    without a config.
    """

    short_name: ClassVar[str] = ""  # of the config that the method's name gives

    def __init__(self, config: AOBaseConfig | None = None, skip: tuple[str, ...] = (), quantized: bool = False) -> None:
        super().__init__()
        _check_device()
        if config is None and self.short_name:
            config = by_name(self.short_name)
        if config is None and not quantized:
            raise ValueError(
                "the model is not quantized, so pennyweight needs a config: --quantization pennyweight-int4 or another "
                "short name, or one in hf_overrides (docs/serving.md)"
            )
        self.config = config
        self.skip = skip

    def __reduce__(self) -> tuple[Any, ...]:  # vLLM sends it to other processes; classes of short names have no module
        return _rebuild, (self.short_name, self.__dict__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r}, skip={self.skip!r})"

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        """The name of the method."""
        return f"{METHOD}-{cls.short_name}" if cls.short_name else METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Asked on GPUs only, which are refused."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the entry is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PennyweightVllmConfig:
        """From "quantization_config" of config.json, of our folders or of another format."""
        if config.get("quant_method") != METHOD:
            return cls(quantized=True)
        if config.get("version", VERSION) != VERSION:
            raise ValueError(f"quantization_config has version {config['version']!r}; this release reads {VERSION}")
        skip = tuple(config.get("skip") or ()) + tuple(config.get("modules_to_not_convert") or ())
        given = config.get("config")
        # An entry that a checkpoint brings has a version; one of hf_overrides describes what to do with float weights.
        if "version" in config or given is None:
            return cls(quantized=True)
        return cls(by_name(given) if isinstance(given, str) else config_from_data(given), skip)

    @classmethod
    def from_config_dict_json(cls, text: str) -> PennyweightVllmConfig:
        """From JSON: a short name, or the data of a config."""
        given = json.loads(text)
        return cls(by_name(given) if isinstance(given, str) else config_from_data(given))

    @classmethod
    def from_config_file(cls, path: str) -> PennyweightVllmConfig:
        """From a file as for ``pennyweight quantize --config``, YAML or JSON."""
        return cls(read_config(path))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take folders of other formats if the user names this method."""
        return METHOD if user_quant == METHOD and not cls.short_name else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer: the weights that arrive decide how it computes."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from .experts import PennyweightExpertsMethod
        from .linear import PennyweightEmbeddingMethod, PennyweightLinearMethod

        if isinstance(layer, VocabParallelEmbedding):
            return PennyweightEmbeddingMethod(prefix)
        if isinstance(layer, LinearBase):
            return PennyweightLinearMethod(prefix)
        if isinstance(layer, RoutedExperts):
            return PennyweightExpertsMethod(prefix, layer.moe_config)
        return None


def _check_device() -> None:
    if not current_platform.is_cpu():
        raise ValueError(
            f"pennyweight's kernels run on CPUs, and vLLM runs on {current_platform.device_name}. Convert the folder "
            "to a format with kernels there: pennyweight convert FOLDER OUT --for vllm-gpu"
        )


_CLASSES: dict[str, type[PennyweightVllmConfig]] = {"": PennyweightVllmConfig} | {
    name: type(f"PennyweightVllmConfig[{name}]", (PennyweightVllmConfig,), {"short_name": name})
    for name in CONFIGS
    if not algorithm_of(name)  # an algorithm needs calibration data
}


def _rebuild(short_name: str, state: dict[str, Any]) -> PennyweightVllmConfig:
    cls = _CLASSES[short_name]
    out = cls.__new__(cls)
    out.__dict__.update(state)
    return out


def register() -> None:
    """Register "pennyweight" and "pennyweight-NAME" for each short config name."""
    for cls in _CLASSES.values():
        register_quantization_config(cls.get_name())(cls)
