"""Checkpoints with tensors that a model of transformers renames, merges or splits while loading: the experts of most
mixtures are one matrix each on disk, and one parameter [experts, out, in] in memory.

The conversions are transformers' own (``conversion_mapping``). They run on quantized tensors too, whose parts are
stacked and concatenated, if all have one spec.
"""

from __future__ import annotations

import copy
import re
import sys
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithms.calibration.disk_offload import empty
from ..core.tensor import AffineQuantizedTensor
from .file import CheckpointError, checkpoint_errors
from .lazy_checkpoint import Opened, StoredTensor
from .manifest import Meta
from .safetensors_file import Entry
from .state_dict import Slot

Read = Callable[[], Tensor]


class Source(NamedTuple):
    """A stored tensor that a conversion takes. meta: None if it is not quantized."""

    name: str
    meta: Meta | None
    read: Read

    @property
    def shown(self) -> str:
        """How it is quantized, with the spec of its inputs."""
        if self.meta is None:
            return "not quantized"
        return " with inputs ".join(str(spec) for spec in (self.meta.spec, self.meta.act) if spec is not None)


class Merge:
    """A conversion of transformers, and the stored tensors that it turns into one or more parameters.

    target    the parameter, or the first of them
    sources   by pattern of the converter
    """

    def __init__(self, converter: Any, target: str) -> None:
        self.converter, self.target = converter, target
        self.sources: dict[str, list[Source]] = {}

    def add(self, pattern: str, source: Source) -> None:
        insort(self.sources.setdefault(pattern, []), source, key=lambda s: _natural(s.name))  # transformers' order

    def run(self, model: Any) -> dict[str, Tensor]:
        """The parameters by name. Raises CheckpointError if the tensors are quantized in different ways."""
        first, *others = (source for some in self.sources.values() for source in some)
        other = next((source for source in others if source.shown != first.shown), None)
        if other is not None:
            raise CheckpointError(
                None, other.name, f"is {other.shown}, but {first.name} is {first.shown}; {type(model).__name__} keeps "
                "them in one parameter: quantize the float checkpoint again, with one config for all of them",
            )  # fmt: skip
        found = self._converted(model, lambda source: source.read)
        for name, tensor in found.items():
            if first.meta is not None and not isinstance(tensor, AffineQuantizedTensor):
                raise CheckpointError(
                    None, first.name, f"is quantized, and {type(model).__name__} stores it as a part of {name} in a "
                    "way that needs other scales; quantize the float checkpoint while loading it, and save the result",
                )  # fmt: skip
        return found

    @property
    def names(self) -> list[str]:
        return [source.name for some in self.sources.values() for source in some]

    def shapes(self, model: Any, kinds: Mapping[str, Meta | Entry]) -> dict[str, Tensor]:
        """The parameters by name, on the meta device. kinds: of the stored tensors."""

        def outline(source: Source) -> Read:
            kind = kinds[source.name]
            return lambda: torch.empty(kind.shape, dtype=kind.dtype, device="meta")

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
        quantized = any(s.meta is not None for some in self.sources.values() for s in some)
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


def under_model_names(checkpoint: Opened, model: nn.Module, slots: Mapping[str, Slot]) -> Opened:
    """The checkpoint with the tensors that the model's parameters and buffers, ``slots``, ask for; itself if it has
    them, each under one of its tied names, or if transformers does not convert it."""
    there = {id(slot.tensor) for name, slot in slots.items() if name in checkpoint}
    if all(id(slot.tensor) in there for slot in slots.values()):
        return checkpoint
    conversions = conversions_of(model)
    if not conversions:
        return checkpoint
    place = {name: (name, None, None) if name in slots else converted_name(name, conversions) for name in checkpoint}
    held: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    merges: dict[str, Merge] = {}
    for name, (target, converter, pattern) in place.items():
        original = checkpoint.aliases.get(name, name)
        stored = checkpoint.held[original]
        if pattern is not None:
            if target not in merges:
                merges[target] = Merge(converter, target)
            merges[target].add(pattern, Source(name, stored.meta, stored.read))
        elif original != name and place[original][2] is None:
            aliases[target] = place[original][0]
        else:
            held[target] = stored
    kinds = {name: checkpoint.held[checkpoint.aliases.get(name, name)].kind for name in place}
    for merge in merges.values():
        with checkpoint_errors(checkpoint.path):
            found = merge.shapes(model, kinds)
        nbytes = sum(checkpoint.held[checkpoint.aliases.get(n, n)].nbytes for n in merge.names)
        for name, outline in found.items():
            read = _reader(checkpoint.path, merge, model, name, outline)
            held[name] = StoredTensor(Entry(outline.dtype, tuple(outline.shape)), nbytes // len(found), read)
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
