"""torchao.prototype.autoround: learned rounding of blocks (AutoRound, Cheng et al. 2023), over our tuner "distill".

    prepare_model_for_applying_auto_round_(model, is_target_module, bits, group_size, iters)
    model(MultiTensor(batches))                                 # optimizes block by block
    quantize_(model, apply_auto_round(), is_target_module)

The codes and scales of a block are trained so that its outputs match the float block's. Needs no other package.
``algorithm=["gptq", "reconstruct"]`` of pennyweight.quantize_ does so from better codes, and reports what it gained.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ....core.tensor import AffineQuantizedTensor
from ....planning.configs import AOBaseConfig, UIntXWeightOnlyConfig
from ....planning.module_handlers import register_quantize_module_handler
from ....quantize.pipeline import quantize_
from .gptq_quantizers import _batch
from .multi_tensor import MultiTensor, batches_of

__all__ = [
    "MultiTensor", "apply_auto_round", "apply_auto_round_optimization", "count_tensor_of_type", "dump_elapsed_time",
    "execution_records", "freeze_random", "gen_example_inputs", "gen_text", "is_auto_round_available",
    "prepare_model_for_applying_auto_round_", "singleton",
]  # fmt: skip

logger = logging.getLogger(__name__)
ROUNDED = "_auto_rounded"  # attribute of a linear layer: its optimized weight, for apply_auto_round()


@dataclass
class _AutoRoundConfig:
    """The options of one prepared model."""

    bits: int = 4
    group_size: int = 128
    iters: int = 200
    use_optimized_layer_output: bool = False
    gradient_accumulate_steps: int = 1
    compile_optimization_process: bool = False


@torch.no_grad()
def prepare_model_for_applying_auto_round_(
    model: nn.Module, is_target_module: Callable[[nn.Module, str], bool], bits: int = 4, group_size: int = 128,
    iters: int = 200, use_optimized_layer_output: bool = False, gradient_accumulate_steps: int | None = 1,
    compile_optimization_process: bool | None = False, device: Any = None,
) -> None:  # fmt: skip
    """The next call of the model, with MultiTensors, optimizes the blocks that ``is_target_module`` selects.

    bits, group_size  of the weights: unsigned integers with integer zero points, 1 to 8 bits
    iters             of Adam, for each block
    use_optimized_layer_output  whether later blocks see the outputs of the quantized ones before them
    gradient_accumulate_steps   batches per step
    device            where to optimize; default: where the model is

    compile_optimization_process is accepted and ignored. Raises ValueError if no module is selected, or for such bits.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, got {bits}")
    targets = _targets(model, is_target_module)
    if not targets:
        raise ValueError("is_target_module selects no module of the model, so nothing would be optimized")
    config = _AutoRoundConfig(bits, group_size, iters, use_optimized_layer_output, gradient_accumulate_steps or 1)
    model.eval()

    @torch.no_grad()
    def first_call(*args: Any, **kwargs: Any) -> Any:
        """The outputs of the float model, as MultiTensors, after the optimization."""
        del model.__dict__["forward"]
        batches = batches_of(args, kwargs)
        outputs = [model.forward(*a, **k) for a, k in batches]
        later: list[tuple[nn.Linear, Tensor]] = []
        for i, (name, block) in enumerate(targets):
            logger.info("auto-round: block %d of %d, %s", i + 1, len(targets), name or "the model")
            found = _optimized(block, _inputs(model, block, batches), config, device)
            if use_optimized_layer_output:
                _put_values(found)
            else:
                later += found
        _put_values(later)
        return _joined(outputs)

    model.forward = first_call  # type: ignore[method-assign]


def _targets(model: nn.Module, is_target_module: Callable[[nn.Module, str], bool]) -> list[tuple[str, nn.Module]]:
    """The outermost selected modules, in order."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer, _ in found)
        if not inside and is_target_module(module, name):
            found.append((name, module))
    return found


def _joined(outputs: list[Any]) -> Any:
    flat = [tree_flatten(out)[0] for out in outputs]
    joined = [MultiTensor(list(c)) if isinstance(c[0], Tensor) else c[0] for c in zip(*flat, strict=True)]
    return tree_unflatten(joined, tree_flatten(outputs[0])[1])


def _inputs(model: nn.Module, block: nn.Module, batches: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """(args, kwargs) of the block in a run of the model over each batch."""
    seen: list[Any] = []
    if block is model:
        return list(batches)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)))

    handle = block.register_forward_pre_hook(see, with_kwargs=True)
    try:
        for args, kwargs in batches:
            model(*args, **kwargs)
    finally:
        handle.remove()
    return seen


def _optimized(
    block: nn.Module, pairs: list[Any], config: _AutoRoundConfig, device: Any
) -> list[tuple[nn.Linear, Tensor]]:
    """(linear layer, optimized weight) of a block, given its (args, kwargs). The block is not changed."""
    with torch.inference_mode(False):
        trial = copy.deepcopy(block)
        trial = trial if device is None else trial.to(device)
        batches = [_batch(trial, *one) for one in pairs]
        recipe = [{"distill": {"steps": config.iters, "batch": config.gradient_accumulate_steps, "metric": "error"}}]
        weights = UIntXWeightOnlyConfig(getattr(torch, f"uint{config.bits}"), config.group_size)
        quantize_(trial, weights, calibration=batches, algorithm=recipe, progress=False)
    found = []
    for name, layer in block.named_modules():
        made = getattr(trial.get_submodule(name), "weight", None)
        if type(layer) is nn.Linear and isinstance(made, AffineQuantizedTensor):
            found.append((layer, made.detach().to(layer.weight.device)))
    return found


def _put_values(found: list[tuple[nn.Linear, Tensor]]) -> None:
    """Each layer keeps its optimized weight for :func:`apply_auto_round`, and computes with its values."""
    for layer, made in found:
        layer.__dict__[ROUNDED] = made
        layer.weight = nn.Parameter(made.dequantize(), requires_grad=False)


def apply_auto_round_optimization(
    module: nn.Module, args: Any, kwargs: Any, output: Any = None, config: _AutoRoundConfig | None = None
) -> Any:
    """Optimize one block on its arguments, MultiTensors. Returns ``output``."""
    _put_values(_optimized(module, batches_of(args, kwargs), config or _AutoRoundConfig(), None))
    return output


@dataclass(frozen=True)
class _Apply(AOBaseConfig):
    """What :func:`apply_auto_round` returns."""

    def __call__(self, module: nn.Module) -> nn.Module:
        return _put_weights(module, self)


def apply_auto_round() -> _Apply:
    """For ``quantize_(model, apply_auto_round(), is_target_module)``, or called with a module: puts the optimized
    weights of its linear layers in place. Raises ValueError for a module without any."""
    return _Apply()


@register_quantize_module_handler(_Apply)
def _put_weights(module: nn.Module, config: _Apply) -> nn.Module:
    done = 0
    for layer in module.modules():
        w = layer.__dict__.pop(ROUNDED, None)
        if w is not None:
            layer.weight = nn.Parameter(w, requires_grad=False)
            done += 1
    if not done:
        raise ValueError(
            "apply_auto_round: the module has no optimized weights; call prepare_model_for_applying_auto_round_, then "
            "the model with MultiTensor inputs"
        )
    return module


# -- torchao.prototype.autoround.utils ---------------------------------------------------------------------------------

execution_records: dict[str, list[float]] = defaultdict(list)


def is_auto_round_available() -> bool:
    """Whether the package auto_round is installed. It is not used here."""
    return importlib.util.find_spec("auto_round") is not None


def singleton(cls: Any) -> Callable[..., Any]:
    """Class decorator: every call returns the object of the first."""
    made: list[Any] = []

    def one(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(cls(*args, **kwargs))
        return made[0]

    return one


def freeze_random(seed: int = 0) -> None:
    """Seed Python's, numpy's and torch's random numbers."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def count_tensor_of_type(mod: nn.Module, cls: Any) -> int:
    """Number of parameters of a class."""
    return sum(isinstance(p, cls) for p in mod.parameters())


def dump_elapsed_time(customized_msg: str = "", record: bool = False) -> Callable[[Any], Any]:
    """Decorator: log the time of each call, in ms; with ``record`` keep it in :data:`execution_records`."""

    def add(func: Any) -> Any:
        @functools.wraps(func)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = func(*args, **kwargs)
            spent = round((time.perf_counter() - start) * 1e3, 2)
            if record:
                execution_records[func.__qualname__].append(spent)
            logger.warning("%s elapsed time: %s ms", customized_msg or func.__qualname__, spent)
            return result

        return timed

    return add


@torch.no_grad()
def gen_text(
    model: Any, tokenizer: Any, msg: str = "", device: Any = None, prompt: str = "What's AI?", max_length: int = 20
) -> None:
    """Print a text that a transformers model generates."""
    inputs = tokenizer(prompt, return_tensors="pt").to(device or model.device)
    new = model.generate(**inputs, max_length=max_length)
    print(f"Generated text ({msg}): {tokenizer.decode(new[0], skip_special_tokens=True)}")


def gen_example_inputs(tokenizer: Any, device: Any, max_length: int = 20) -> tuple[Tensor]:
    """Token ids of a short prompt, padded."""
    inputs = tokenizer("What's AI?", return_tensors="pt", padding="max_length", max_length=max_length)
    return (inputs["input_ids"].to(device),)
