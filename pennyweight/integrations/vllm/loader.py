"""The weight loader: reads checkpoints by :func:`pennyweight.open`, so that vLLM's models receive quantized tensors.

A model's ``load_weights`` sees one tensor per weight, whatever the file stores for it. Renaming, transposing and
cutting are then ordinary tensor operations, done on the quantized parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...algorithms.solve import solve
from ...core.tensor import AffineQuantizedTensor
from ...io.checkpoint import Checkpoint, open_checkpoint
from ...io.detect_format import open as open_any
from ...io.meta_model import outline
from ...planning.plan import plan
from .config import PennyweightVllmConfig
from .linear import check_complete

REPLACED = ("auto", "hf", "safetensors")  # load formats that read a folder of safetensors


class PennyweightModelLoader(DefaultModelLoader):
    """vLLM's loader, except for models whose quantization is ours."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill ``model``. Raises CheckpointError for a folder that cannot be read, or lacks weights of the model."""
        config = _config_of(model)
        if config is None:
            return super().load_weights(model, model_config)
        if getattr(model, "secondary_weights", ()):
            raise ValueError(f"pennyweight does not load {type(model).__name__}, whose weights are in several folders")
        source = self._prepare_weights(
            model_config.model, None, model_config.revision,
            fall_back_to_pt=False, allow_patterns_overrides=["*.safetensors"],
        )  # fmt: skip
        folder = source[0]
        with ExitStack() as opened:
            weights = _quantized(folder, opened) if config.config is None else _quantizing(folder, config, opened)
            loaded = model.load_weights((name, _to(t, model_config.dtype)) for name, t in weights)
        check_complete(model, loaded, folder)
        return None


def _config_of(model: nn.Module) -> PennyweightVllmConfig | None:
    configs = (getattr(module, "quant_config", None) for module in model.modules())
    return next((c for c in configs if isinstance(c, PennyweightVllmConfig)), None)


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if isinstance(t, AffineQuantizedTensor) else t


def _quantized(folder: str, opened: ExitStack) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a quantized checkpoint in the order of the file, then those with another name, such as a tied head."""
    checkpoint = opened.enter_context(open_any(folder))
    for name, stored in checkpoint.held.items():
        yield name, stored.read()
    for alias, name in checkpoint.aliases.items():
        yield alias, checkpoint.held[name].read()


def _quantizing(folder: str, config: PennyweightVllmConfig, opened: ExitStack) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a float checkpoint, quantized one at a time as ``quantize_checkpoint`` would."""
    source: Checkpoint = opened.enter_context(open_checkpoint(folder))
    if source.manifest.tensors:
        raise ValueError(
            f"{folder} is already quantized: serve it without a config (quantization={config.get_name()!r} quantizes "
            "float weights)"
        )
    assert config.config is not None
    todo = plan(outline(source)[0], config.config, skip=config.skip)
    logging.getLogger("vllm.pennyweight").info("pennyweight quantizes %d weights of %s", len(todo.active), folder)
    rows = {place.name: row for row in todo.rows for place in row.places}
    for name, i in source.where.items():
        file, e = source.files[i], source.entry(name)
        x = file.read(name, 0, e.numel).reshape(e.shape)
        row = rows.get(name)
        quantized = row is not None and row.scheme is not None
        yield name, solve(replace(row, tensor=x, layout="plain")).weight if quantized else x


def register() -> None:
    """Put the loader in place of vLLM's, to which it forwards models of other methods."""
    log = logging.getLogger("vllm.model_executor.model_loader")
    level = log.level
    log.setLevel(logging.ERROR)  # a warning at each start that the loader is replaced would be noise
    try:
        for name in REPLACED:
            register_model_loader(name)(PennyweightModelLoader)
    finally:
        log.setLevel(level)
