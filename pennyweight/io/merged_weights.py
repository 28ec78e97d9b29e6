"""Checkpoints with tensors that a model of transformers renames, merges or splits while loading: the experts of most
mixtures are one matrix each on disk, and one parameter [experts, out, in] in memory.

The conversions are transformers' own (``conversion_mapping``). They run on quantized tensors too, whose parts are
stacked and concatenated, if all have one spec.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithms.calibration.disk_offload import empty
from ..core.tensor import AffineQuantizedTensor
from .file import CheckpointError, checkpoint_errors
from .lazy_checkpoint import Opened, StoredTensor
from .safetensors_file import Entry

Read = Callable[[], Tensor]


class Source(NamedTuple):
    """A stored tensor that a conversion takes. shown: its storage type; None: it is not quantized."""

    name: str
    shown: str | None
    read: Read


class Merge:
    """A conversion of transformers, and the stored tensors that it turns into one or more parameters.

    target    the parameter, or the first of them
    sources   by pattern of the converter
    """

    def __init__(self, converter: Any, target: str) -> None:
        self.converter, self.target = converter, target
        self.sources: dict[str, list[Source]] = {}

    def add(self, pattern: str, source: Source) -> None:
        some = self.sources.setdefault(pattern, [])
        some.append(source)
        some.sort(key=lambda s: _natural(s.name))  # as transformers does

    def run(self, model: Any) -> dict[str, Tensor]:
        """The parameters by name. Raises CheckpointError if the tensors are quantized in different ways."""
        first, *others = (source for some in self.sources.values() for source in some)
        other = next((source for source in others if source.shown != first.shown), None)
        if other is not None:
            raise CheckpointError(
                None, other.name, f"is {other.shown or 'not quantized'}, but {first.name} is {first.shown or 'not'}; "
                f"{type(model).__name__} keeps them in one parameter, so they must be quantized alike",
            )  # fmt: skip
        found = self._converted(model, lambda source: source.read)
        for name, tensor in found.items():
            if first.shown is not None and not isinstance(tensor, AffineQuantizedTensor):
                raise CheckpointError(
                    None, first.name, f"is quantized, and {type(model).__name__} stores it as a part of {name} in a "
                    "way that needs other scales; quantize the float checkpoint while loading it, and save the result",
                )  # fmt: skip
        return found

    def shapes(self, model: Any, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """The parameters by name, on the meta device. shapes: of the stored tensors."""

        def outline(source: Source) -> Read:
            shape, dtype = shapes[source.name]
            return lambda: torch.empty(shape, dtype=dtype, device="meta")

        return self._converted(model, outline)

    def _converted(self, model: Any, read: Callable[[Source], Read]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, some in self.sources.items():
            converter.collected_tensors[pattern] = [read(source) for source in some]
        try:
            found = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # what other shapes or types raise there
            if isinstance(error, CheckpointError):
                raise
            counts = ", ".join(f"{len(some)} of {pattern}" for pattern, some in self.sources.items())
            raise CheckpointError(
                None, self.target, f"cannot be made of what is stored ({counts}): {str(error).splitlines()[0]}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def stack(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """The parameter of experts whose matrices, or those of gate and up beside each other, are stacked: written into
        it one by one. None for other conversions, and for quantized tensors."""
        kinds = [(type(op).__name__, op.dim) for op in self.converter.operations if hasattr(op, "dim")]
        quantized = any(s.shown is not None for some in self.sources.values() for s in some)
        known = kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
        if not known or len(kinds) != len(self.converter.operations) or quantized or len(shape) != 3:
            return None
        out, begin = empty(shape, dtype, torch.device("cpu")), 0
        for pattern in self.converter.source_patterns:
            end = begin
            for e, source in enumerate(self.sources.get(pattern, [])):
                x = source.read()
                end = begin + len(x)
                out[e, begin:end] = x
            begin = end
        return out


def conversions_of(model: nn.Module) -> list[Any]:
    """transformers' conversions of the stored tensors of a model; none for a model that is not one of transformers."""
    classes = sys.modules.get("transformers.modeling_utils")
    if classes is None or not isinstance(model, classes.PreTrainedModel):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def converted_name(name: str, conversions: list[Any]) -> tuple[str, Any, str | None]:
    """(the parameter that a stored tensor becomes, or the first of them; the converter and its pattern, or None)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    for one in conversions:
        if isinstance(one, WeightRenaming):
            name, _ = one.rename_source_key(name)
    for one in conversions:
        if isinstance(one, WeightConverter):
            target, pattern = one.rename_source_key(name)
            if pattern is not None:
                return target, one, pattern
    return name, None, None


def under_model_names(checkpoint: Opened, model: nn.Module, names: Mapping[str, Any]) -> Opened:
    """The checkpoint with the tensors that ``names``, of the model's parameters and buffers, ask for; itself if it has
    them, or if transformers does not convert it."""
    if all(name in checkpoint for name in names):
        return checkpoint
    conversions = conversions_of(model)
    if not conversions:
        return checkpoint
    held: dict[str, StoredTensor] = {}
    merges: dict[str, Merge] = {}
    shapes = {name: (tuple(stored.kind.shape), stored.kind.dtype) for name, stored in checkpoint.held.items()}
    for name, stored in checkpoint.held.items():
        target, converter, pattern = converted_name(name, conversions)
        if converter is None or pattern is None or name in names:
            held[name if name in names else target] = stored
        else:
            merge = merges.setdefault(target, Merge(converter, target))
            merge.add(pattern, Source(name, None if stored.meta is None else stored.shown, stored.read))
    for merge in merges.values():
        nbytes = sum(checkpoint.held[s.name].nbytes for some in merge.sources.values() for s in some)
        with checkpoint_errors(checkpoint.path):
            found = merge.shapes(model, shapes)
        for name, outline in found.items():
            read = _reader(checkpoint.path, merge, model, name, outline)
            held[name] = StoredTensor(Entry(outline.dtype, tuple(outline.shape)), nbytes // len(found), read)
    renamed = {name: converted_name(name, conversions)[0] for pair in checkpoint.aliases.items() for name in pair}
    aliases = {renamed[alias]: renamed[name] for alias, name in checkpoint.aliases.items()}
    return replace(checkpoint, held=held, aliases=aliases)


def _reader(path: str, merge: Merge, model: nn.Module, name: str, outline: Tensor) -> Read:
    def read() -> Tensor:
        stacked = merge.stack(tuple(outline.shape), outline.dtype)
        if stacked is not None:
            return stacked
        with checkpoint_errors(path):
            return merge.run(model)[name]

    return read


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders names by their numbers: expert 2 before expert 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
