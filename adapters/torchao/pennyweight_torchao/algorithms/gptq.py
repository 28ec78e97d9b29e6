"""torchao.prototype.gptq: GPTQ as two calls of quantize_ around the calibration, over our solver "gptq".

    quantize_(model, GPTQConfig("observe", base));  model(batch) ...;  quantize_(model, GPTQConfig("convert", base))

Every layer sees the inputs of the float model. ``pennyweight.quantize_(model, base, calibration=batches,
algorithm="gptq")`` calibrates block by block on the outputs of the quantized blocks before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.algorithms.calibration.collect_statistics import CollectedStatistics
from pennyweight.algorithms.solve import solve
from pennyweight.algorithms.solvers.gptq import GPTQ
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.planning.plan import plan

from ..base_tensor import TorchAOBaseTensor
from ..quant_api import _ExtraRepr

__all__ = ["GPTQConfig", "GPTQObserverTensor", "gptq_quantize", "gptq_quantize_3d"]

aten = torch.ops.aten


class GPTQObserverTensor(TorchAOBaseTensor):
    """A float weight [N, K], or experts' [E, N, K], that adds up the Hessian of its inputs when it is used.

        hessian = 2 / total_batches * sum of x x^T,  [K, K] or [E, K, K], float32

    total_batches  [1] or [E]: inputs [rows, K] count as one, [batch, .., K] as ``batch``
    """

    tensor_data_names = ["hp_data", "total_batches"]  # noqa: RUF012
    optional_tensor_data_names = ["hessian"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    hp_data: Tensor
    total_batches: Tensor
    hessian: Tensor

    @staticmethod
    def __new__(
        cls: Any, hp_data: Tensor, total_batches: Tensor | int = 0, hessian: Tensor | None = None
    ) -> GPTQObserverTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, hp_data.shape, dtype=hp_data.dtype, device=hp_data.device, requires_grad=False
        )

    def __init__(self, hp_data: Tensor, total_batches: Tensor | int = 0, hessian: Tensor | None = None) -> None:
        if hp_data.ndim not in (2, 3):
            raise ValueError(f"GPTQ observes weights of 2 or 3 axes, got {list(hp_data.shape)}")
        experts, k = hp_data.shape[:-2], hp_data.shape[-1]
        self.hp_data = hp_data
        if isinstance(total_batches, Tensor):
            self.total_batches = total_batches
        else:
            self.total_batches = torch.full(experts or (1,), total_batches, dtype=torch.int64, device=hp_data.device)
        if hessian is None:
            hessian = torch.zeros(*experts, k, k, dtype=torch.float32, device=hp_data.device)
        self.hessian = hessian

    @classmethod
    def from_hp(cls, hp_tensor: Tensor) -> GPTQObserverTensor:
        return cls(hp_tensor.detach())

    def update_2d(self, input: Tensor) -> None:
        """Add an input [.., K] of a matrix."""
        _add(input, self.hessian, self.total_batches[0:1])

    def update_3d(self, input: Tensor) -> None:
        """Add an input [E, rows, K] of the experts."""
        for e in range(self.hessian.shape[0]):
            _add(input[e], self.hessian[e], self.total_batches[e : e + 1])

    def update_3d_with_offs(self, input: Tensor, offs: Tensor) -> None:
        """Add rows [rows, K]; expert e has those up to ``offs[e]``."""
        begin = 0
        for e, end in enumerate(offs.tolist()):
            if end > begin:
                _add(input[begin:end], self.hessian[e], self.total_batches[e : e + 1])
            begin = end


def _add(x: Tensor, hessian: Tensor, total: Tensor) -> None:
    """Add x to a running mean of 2 x x^T over batches, in place."""
    batches = 1 if x.ndim <= 2 else x.shape[0]
    rows = x.detach().float().to(hessian.device).reshape(-1, x.shape[-1])
    before = int(total)
    total += batches
    hessian *= before / (before + batches)
    rows = rows * (2 / (before + batches)) ** 0.5
    hessian += rows.t() @ rows


@GPTQObserverTensor.implements([aten.linear.default])
@GPTQObserverTensor.implements_torch_function([F.linear, aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, w = given["input"], given["weight"]
    if not isinstance(w, GPTQObserverTensor):
        raise ValueError(f"linear: the weight must be the GPTQObserverTensor, got {type(w).__name__}")
    w.update_2d(x)
    return F.linear(x, w.hp_data, given.get("bias"))


@GPTQObserverTensor.implements([aten.transpose.int])
def _transpose(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, a, b = args
    if {a % w.ndim, b % w.ndim} != {w.ndim - 2, w.ndim - 1}:
        raise NotImplementedError(f"GPTQObserverTensor: only the last two axes can be swapped, got {a} and {b}")
    return GPTQObserverTensor(func(w.hp_data, a, b), w.total_batches, func(w.hessian, a, b))


@GPTQObserverTensor.implements([aten.bmm.default])
def _bmm(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, w = args
    w.update_3d(x)
    return func(x, w.hp_data)


@GPTQObserverTensor.implements([aten._grouped_mm.default])
def _grouped_mm(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, w, *rest = args
    offs = rest[0] if rest else kwargs.get("offs")
    if offs is None:
        raise ValueError("_grouped_mm of a GPTQObserverTensor needs offs, the end of each expert's rows")
    w.update_3d_with_offs(x, offs)
    return func(x, w.hp_data, offs)


@dataclass
class GPTQConfig(AOBaseConfig):
    """GPTQ over a config of the weights: any config, not only int4, int8 and NVFP4.

    step      "observe": weights record their inputs. "convert": quantize them
    percdamp  initial damping, as a fraction of the mean of the Hessian's diagonal
    gptq_quantize_block_size  accepted: our loop has its own, which changes no result
    """

    step: str = "observe"
    base_config: Any = None
    percdamp: float = 0.01
    gptq_quantize_block_size: int = 256

    def __post_init__(self) -> None:
        if self.base_config is None:
            raise ValueError("base_config is required for GPTQ quantization.")
        if not isinstance(self.base_config, AOBaseConfig):
            raise ValueError(f"base_config must be a config such as Int4WeightOnlyConfig(), got {self.base_config!r}")


@register_quantize_module_handler(GPTQConfig)
def _gptq_config_transform(module: nn.Module, config: GPTQConfig, *, parameter_name: str = "weight") -> nn.Module:
    w = getattr(module, parameter_name)
    if config.step == "observe":
        new: Tensor = GPTQObserverTensor.from_hp(w.contiguous())
    elif config.step != "convert":
        raise ValueError(f"Invalid step '{config.step}'. Must be 'observe' or 'convert'.")
    elif not isinstance(w, GPTQObserverTensor):
        raise ValueError(
            f"Expected {parameter_name} to be GPTQObserverTensor in 'convert' step, but got {type(w).__name__}; call "
            'quantize_ with step="observe" first, and run the calibration data'
        )
    elif not bool((w.total_batches > 0).all()):
        raise ValueError(
            f"No observations recorded for {parameter_name}: total_batches is {w.total_batches.tolist()}; run the "
            "calibration data through the model after the observe step"
        )
    else:
        quantize: Any = gptq_quantize if w.ndim == 2 else gptq_quantize_3d
        new = quantize(w.hessian, w.hp_data, config)
    setattr(module, parameter_name, nn.Parameter(new, requires_grad=False))
    if type(module) is nn.Linear:
        module.extra_repr = _ExtraRepr(module)  # type: ignore[method-assign]
    return module


@torch.no_grad()
def gptq_quantize(H: Tensor, W_t: Tensor, config: GPTQConfig) -> Tensor:
    """The weight [N, K] quantized under ``config.base_config``, given the Hessian H [K, K] of its inputs.

    Columns are rounded in order; the scales are those of the weight itself, also in groups, where torchao's are those
    of the columns after the updates. No row's output error on the calibration inputs is above round-to-nearest's.
    """
    assert W_t.ndim == 2, f"gptq_quantize takes a matrix, got {list(W_t.shape)}"
    assert H.shape == (W_t.shape[1],) * 2, f"H must be {[W_t.shape[1]] * 2} for W_t {list(W_t.shape)}"
    n, k = W_t.shape
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=W_t.dtype)
    layer.weight = nn.Parameter(W_t.detach(), requires_grad=False)
    row = plan(nn.Sequential(layer), config.base_config).active[0]
    solver = GPTQ(damping=config.percdamp, shrinkage=0.0, activation_order=False)
    return solve(row, solver, CollectedStatistics({"hessian": H.float().unsqueeze(0)}, 0)).weight


def gptq_quantize_3d(H: Tensor, W_t: Tensor, config: GPTQConfig) -> Tensor:
    """Experts [E, N, K], each with its Hessian H [E, K, K]."""
    assert H.ndim == W_t.ndim == 3, f"expected Hessians and weights of 3 axes, got {list(H.shape)}, {list(W_t.shape)}"
    assert H.shape[0] == W_t.shape[0], f"{H.shape[0]} Hessians for {W_t.shape[0]} experts"
    made: Any = [gptq_quantize(h, w, config) for h, w in zip(H, W_t, strict=True)]
    return torch.stack([w.to_layout("plain") for w in made])
