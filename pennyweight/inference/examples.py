"""Finds the blocks of a model and how the model calls them: by one run on an example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..planning.run_batch import run_batch
from ..support.errors import Refusal


class Random:
    """Reproducible random tensors on the CPU, float32 or int64, independent of torch's generator and defaults."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Mean 0, variance 1."""
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu")

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """From 0 to 1."""
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """From low to high - 1."""
        return torch.randint(low, high, tuple(shape), generator=self.generator, dtype=torch.int64, device="cpu")


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


BATCH, TOKENS = 2, 5  # different, so that an exchange of both is seen


@dataclass
class Observed:
    """A call of a block: its arguments by name, and what it returned."""

    arguments: dict[str, Any]
    output: Any


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Possible blocks: entries of a ModuleList or Sequential with two or more quantized linear layers in them, and each
    nn.TransformerEncoderLayer; outer ones only."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, nn.TransformerEncoderLayer) and _quantized(module):
            found[name] = module
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for key, child in module.named_children():
            if any(True for _ in child.children()) and _quantized(child) > 1 and not _holds_lists(child):
                found[f"{name}.{key}" if name else key] = child
    return found


def _quantized(module: nn.Module) -> int:
    return sum(isinstance(p, AffineQuantizedTensor) for p in module.parameters())


def _holds_lists(module: nn.Module) -> bool:
    """Whether it holds a list of modules with quantized layers: then those may be the blocks."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return any(_quantized(child) > 1 for m in lists for child in m.children())


def bound_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name. Raises Refusal for ``*args``."""
    names: dict[str, Any] = {}
    for parameter, value in zip(signature(module), args, strict=False):
        names[parameter] = value
    if len(args) > len(names):
        raise Refusal("it is called with more positional arguments than it names")
    return {**names, **kwargs}


def signature(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of a module's forward."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def observe(model: nn.Module, blocks: Mapping[str, nn.Module], example: Any) -> dict[str, Observed | Refusal]:
    """The first call of each block in ``model(example)``."""
    seen: dict[str, Observed | Refusal] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if name not in seen:
                try:
                    seen[name] = Observed(bound_arguments(module, args, kwargs), out)
                except Refusal as refusal:
                    seen[name] = refusal

        return hook

    with ExitStack() as hooks:
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_hook(hook_for(name), with_kwargs=True))
        run_batch(model, example)
    return seen


def with_config(model: nn.Module) -> bool:
    """Whether it is a model of transformers, whose config says what its inputs are."""
    return getattr(model, "config", None) is not None and hasattr(model, "main_input_name")


def roots(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost models of transformers by their names in ``model``, such as the encoder of a SentenceTransformer;
    ``model`` itself, under "", if there are none."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if with_config(module) and not inside:
            found[name] = module
    return found or {"": model}


def examples(model: nn.Module, block: nn.Module) -> Iterator[Any]:
    """Inputs to try with the model: for models of transformers from their config, for nn.TransformerEncoder(Layer)
    random rows."""
    random = Random(0)
    if not with_config(model):
        if isinstance(block, nn.TransformerEncoderLayer):
            norm = block.norm1.weight
            width, dtype = block.self_attn.embed_dim, torch.float32 if norm is None else norm.dtype
            yield random.normal((BATCH, TOKENS, width)).to(dtype)
        return
    config: Any = model.config
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    names = inspect.signature(type(model).forward).parameters

    def make(name: str) -> Tensor | None:
        return _input(name, model, config, random, dtype)

    main: Any = model.main_input_name
    first = {main: make(main)}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        first["decoder_input_ids"] = make("decoder_input_ids")
    if first[main] is not None:
        yield first
        others = {n: make(n) for n in ("input_ids", "pixel_values", "input_features", "input_values") if n in names}
        yield {**{n: t for n, t in others.items() if t is not None}, **first}


def _input(name: str, model: Any, config: Any, random: Random, dtype: torch.dtype) -> Tensor | None:
    """A random input of a transformers model; None if its size is unknown."""

    def size(*names: str) -> Any:
        parts = [config, *(getattr(config, f"{part}_config", None) for part in ("text", "vision", "audio"))]
        return next((v for part in parts for n in names if (v := getattr(part, n, None)) is not None), None)

    if name.endswith("input_ids"):
        vocabulary = size("vocab_size")
        # the smallest numbers are often special tokens: padding, end of text
        return random.integers(min(4, vocabulary - 1), vocabulary, (BATCH, TOKENS))
    if name == "pixel_values" and size("image_size") is not None:
        side = size("image_size")
        height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
        return random.normal((BATCH, size("num_channels") or 3, height, width)).to(dtype)
    if name == "input_features" and size("num_mel_bins") and size("max_source_positions"):
        frames = 2 * size("max_source_positions")
        return random.normal((BATCH, size("num_mel_bins"), frames)).to(dtype)
    if name == "input_values":
        return random.normal((BATCH, 4000)).to(dtype)
    return None
