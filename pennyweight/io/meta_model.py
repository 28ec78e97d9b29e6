"""Builds a model without values for a checkpoint on disk, so that planning sees layers and not only names; tokenizers.

Uses config.json where transformers knows the architecture, otherwise the names and shapes of the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..core.spec import DTYPES
from ..support.extras import install
from .checkpoint import Checkpoint
from .config_files import read_config
from .detect_format import model_folder
from .detect_format import open as open_any
from .file import CheckpointError
from .safetensors_file import Entry
from .state_dict import slots_of

# Parts of a module's name which show that its 2-d weight is a lookup table or scales channels, and is not a matrix
_TABLES = ("embed", "wte", "wpe", "position", "token_type", "relative_attention_bias")
_SCALES = ("norm", "ln_", "layer_norm", "layernorm")
_ROUTERS = ("gate", "router")  # beside experts: choose among them, and are not linear layers in transformers either
# How the files of tokenizers begin
_TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "source.spm")
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


def outline(checkpoint: Checkpoint) -> tuple[nn.Module, str]:
    """(model on the meta device, with the checkpoint's dtypes and shapes; a note on how it was built)."""
    entries = {name: checkpoint.entry(name) for name in checkpoint.where}
    aliases = {alias: name for alias, name in checkpoint.manifest.aliases.items() if name in entries}
    entries |= {alias: entries[name] for alias, name in aliases.items()}
    built = from_config(checkpoint.path, entries)
    if isinstance(built, nn.Module):
        return built, f"layers from config.json: {type(built).__name__}"
    model = from_names(entries)
    slots = slots_of(model)
    for alias, name in aliases.items():
        if slots[alias].is_param:
            slots[alias].module._parameters[slots[alias].attr] = slots[name].module._parameters[slots[name].attr]
    return model, f"layers guessed from names ({built})"


def from_config(folder: str, entries: Mapping[str, Entry]) -> nn.Module | str:
    """The architecture that config.json names, built by transformers without values; or why it cannot be built."""
    built = _built(folder, "meta")
    return built if isinstance(built, str) else _fitted(built, entries) or built


def fresh_model(path: str) -> nn.Module:
    """The architecture that config.json names, or the metadata of a GGUF file, for :func:`load` to fill: parameters are
    on the meta device, buffers on the CPU.

    Buffers that no checkpoint contains keep their values; one that this checkpoint contains, as with older releases of
    transformers, becomes persistent. Raises CheckpointError if transformers cannot build it.
    """
    with model_folder(path, tokenizer=False) as folder, parameters_on_meta():
        built = _built(folder, "cpu")
    if isinstance(built, str):
        raise CheckpointError(path, None, f"{built}; the layers of the model cannot be determined")
    with open_any(path) as checkpoint:
        stored = set(checkpoint)
    for prefix, module in built.named_modules():
        here = {n for n in module._non_persistent_buffers_set if (f"{prefix}.{n}" if prefix else n) in stored}
        module._non_persistent_buffers_set.difference_update(here)
    return built.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules created inside have no weights; their buffers are real, since files do not contain non-persistent
    ones."""

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:  # unchanged: a tied one must stay the same object
            return None
        fresh: Any = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        fresh._is_hf_initialized = True  # transformers leaves it alone: random numbers on meta cost 0.5 ms a tensor
        return fresh  # type: ignore[no-any-return]

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def load_tokenizer(path: str | os.PathLike[str], *, config_folder: str | None = None) -> Any:
    """The tokenizer of a model's folder, or that of a GGUF file's metadata. Runs no code from the folder.

    config_folder   with the tokenizer's files; default: that of ``path``

    Raises ValueError if there is none or transformers cannot load it, and CheckpointError as :func:`model_folder`.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"tokenizers need transformers: {install('hf')}") from None
    path = os.fspath(path)
    with model_folder(path) if config_folder is None else nullcontext(config_folder) as folder:
        if read_config(folder) is None:
            raise ValueError(f"{path} has no config.json; a tokenizer needs the folder of a model")
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers may raise anything for invalid files
            if not any(name.startswith(_TOKENIZERS) for name in os.listdir(folder)):
                raise ValueError(f"{path} has no tokenizer; copy the files of the float model's folder") from error
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path}: its tokenizer cannot be loaded: {type(error).__name__}: {reason}") from error


def _built(folder: str, device: str) -> nn.Module | str:
    """The model of a folder's config.json; or the reason there is none."""
    config = read_config(folder)
    try:
        return "there is no config.json" if config is None else _build(config, device)
    except Exception as e:  # any error of transformers
        return f"transformers cannot build it: {type(e).__name__}: {str(e)[:200]}"


def model_class(config: dict[str, Any]) -> Any | str:
    """The class of transformers that a config.json names, compared by name and never looked up by name; or the reason
    there is none."""
    try:
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return "transformers is not installed"
    kind, wanted = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or not (isinstance(wanted, list) and wanted):
        return f"transformers has no model of type {str(kind)[:60]!r}"
    config_class = CONFIG_MAPPING[kind]
    autos = (getattr(modeling_auto, n) for n in dir(modeling_auto) if n.startswith("AutoModel"))
    # Whether a mapping is empty is not asked: its bool() imports every config of transformers, 8 s
    mappings = [auto._model_mapping for auto in autos if auto._model_mapping is not None]
    found = [mapping[config_class] for mapping in mappings if config_class in mapping]
    classes = [c for f in found for c in (f if isinstance(f, (tuple, list)) else [f])]
    named = next((c for c in classes if c.__name__ == wanted[0]), None)
    return f"transformers has no {str(wanted[0])[:60]} for {kind}" if named is None else named


def _build(config: dict[str, Any], device: str) -> nn.Module | str:
    """The model of a config, without values on the meta device; or the reason there is none."""
    cls = model_class(config)
    if isinstance(cls, str):
        return cls
    # Only values that determine shapes: names of code, dtypes and private keys in a file are not passed to transformers
    drop = ("auto_map", "architectures", "quantization_config", "torch_dtype", "dtype", "transformers_version")
    plain = {k: v for k, v in config.items() if k not in drop and not k.startswith("_")}
    with torch.device(device):
        return cls(cls.config_class.from_dict(plain))


def _fitted(model: nn.Module, entries: Mapping[str, Entry]) -> str | None:
    """Give parameters the checkpoint's dtypes; or name a tensor of the checkpoint that the model does not have."""
    slots = slots_of(model)
    for name, e in entries.items():
        if name not in slots or tuple(slots[name].tensor.shape) != e.shape:
            return f"{name} {list(e.shape)} is not a tensor of {type(model).__name__}"
    new: dict[int, nn.Parameter] = {}
    for name, slot in slots.items():
        if slot.is_param and name in entries and id(slot.tensor) not in new:
            new[id(slot.tensor)] = _empty(entries[name])
    for slot in slots.values():
        if id(slot.tensor) in new:
            slot.module._parameters[slot.attr] = new[id(slot.tensor)]
    return None


def from_names(entries: Mapping[str, Entry]) -> nn.Module:
    """Modules derived from names: a 2-d ``weight`` is a linear layer unless its name indicates something else."""
    stored: dict[str, dict[str, Entry]] = {}
    for name, e in entries.items():
        module, _, attr = name.rpartition(".")
        stored.setdefault(module, {})[attr] = e
    root = _module("", stored.get("", {}))
    made = {"": root}
    routed = {path.partition(".experts.")[0] for path in stored if ".experts." in path}
    for path in sorted(stored):
        for end in [i for i, c in enumerate(path) if c == "."] + [len(path)]:
            here = path[:end]
            if here in made:
                continue
            parent, _, child = here.rpartition(".")
            router = child in _ROUTERS and parent in routed
            made[here] = made[parent]._modules[child] = _module(here, stored.get(here, {}), router)
    return root


def _module(path: str, attrs: Mapping[str, Entry], router: bool = False) -> nn.Module:
    module = nn.Module() if router else _layer(path, attrs.get("weight"))
    module._parameters.update(dict.fromkeys(module._parameters))  # all None: only stored parameters exist
    for attr, e in attrs.items():
        table: dict[str, Any] = module._parameters if e.dtype.is_floating_point else module._buffers
        table[attr] = _empty(e) if e.dtype.is_floating_point else torch.empty(e.shape, dtype=e.dtype, device="meta")
        if getattr(module, attr) is not table[attr]:
            raise CheckpointError(None, f"{path}.{attr}", "its name is an attribute of every module")
    return module


def looks_linear(name: str, e: Entry) -> bool:
    """Whether a float tensor is a linear layer's weight, by its name and shape."""
    module, _, attr = name.rpartition(".")
    return attr == "weight" and isinstance(_layer(module, e), nn.Linear)


def _layer(path: str, weight: Entry | None) -> nn.Module:
    """A layer with that weight shape; its other parameters are cleared."""
    if weight is None or weight.dtype not in DTYPES.values() or 0 in weight.shape:
        return nn.Module()
    shape, words = weight.shape, path.lower()
    if len(shape) == 2 and not any(w in words.rpartition(".")[2] for w in _SCALES):
        if any(w in words for w in _TABLES):
            return nn.Embedding(*shape, device="meta")
        return nn.Linear(shape[1], shape[0], bias=False, device="meta")
    if len(shape) in _CONVOLUTIONS and "expert" not in words:
        return _CONVOLUTIONS[len(shape)](shape[1], shape[0], shape[2:], bias=False, device="meta")  # type: ignore[arg-type]
    return nn.Module()


def _empty(e: Entry) -> nn.Parameter:
    return nn.Parameter(torch.empty(e.shape, dtype=e.dtype, device="meta"), requires_grad=False)
