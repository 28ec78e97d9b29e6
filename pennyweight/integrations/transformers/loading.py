"""The models of folders that transformers would pass to another library, read by ``pw.load``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...core.model_arguments import check_arguments
from ...core.tensor import AffineQuantizedTensor
from ...io.detect_format import opened_model_folder
from ...io.loading import load, load_opened
from ...io.meta_model import parameters_on_meta
from ...io.state_dict import slots_of
from ...support.arguments import check_nothing, show
from ...support.errors import ArgumentTypeError
from ...support.progress import step
from .saving import attach_quantizer


@check_arguments(dtype=check_nothing)
def load_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    config: Any = None,
    config_folder: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Any:
    """The model of config.json, with weights read by ``pw.load``: quantized ones stay quantized.

    model_class     an Auto class such as AutoModelForCausalLM, or a class such as LlamaForCausalLM
    folder          or a GGUF file; then the config is that of its metadata
    dtype           of the parameters; default: as stored in the files
    device, strict  as for ``pw.load``
    config          instead of config.json
    config_folder   with config.json and generation_config.json; default: that of the files
    kwargs          passed to the model constructor: attn_implementation etc.

    For files whose "quantization_config" transformers would pass to another library, or not read at all. The model can
    be saved by ``save_pretrained``, in our format. Raises the errors of ``pw.load`` and AutoConfig.
    """
    from transformers import AutoConfig, GenerationConfig

    if not hasattr(model_class, "from_config") and not hasattr(model_class, "_from_config"):
        raise ArgumentTypeError(
            f"model_class must be a class of transformers such as AutoModelForCausalLM, got {show(model_class)}"
        )
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    path = os.fspath(folder)
    own = opened_model_folder(path, tokenizer=False)
    with own if config_folder is None else nullcontext((os.fspath(config_folder), None)) as (files, opened):
        config = AutoConfig.from_pretrained(files) if config is None else config
        settings = os.path.join(files, "generation_config.json")
        generation = GenerationConfig.from_pretrained(files) if os.path.isfile(settings) else None
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        config.name_or_path = path
        if dtype is not None:
            kwargs["dtype"] = dtype
        with parameters_on_meta():
            model = make(config, **kwargs)
        made = model.dtype
        if opened is None:
            load(path, model, strict=strict, device=device)
        else:  # a file with a long vocabulary is not parsed twice
            with step("load", None) as advance:
                load_opened(opened, model, strict=strict, device=device, advance=advance)
    if dtype is not None:
        _cast(model, made)
    if device is not None:
        model.to(device)
    if model.can_generate() and generation is not None:
        model.generation_config = generation
    if any(isinstance(p, AffineQuantizedTensor) for p in model.parameters()):
        attach_quantizer(model)
    return model.eval()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: buffers such as position frequencies are computed in float32 and stay so."""
    new: dict[int, nn.Parameter] = {}
    for slot in slots_of(model).values():
        old = slot.tensor
        if slot.is_param and old.is_floating_point() and old.dtype != dtype:
            if id(old) not in new:
                new[id(old)] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
            slot.module._parameters[slot.attr] = new[id(old)]
