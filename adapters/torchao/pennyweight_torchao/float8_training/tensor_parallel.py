"""torchao.float8.float8_tensor_parallel: torch's parallel styles for float8 layers.

torchao casts the input before it is gathered, so that less is sent. Here it is gathered in its own dtype and cast by
the layer, with the same scale, so that results are those of torchao. Needs torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from .config import Float8LinearConfig, ScalingType
from .layers import Float8Linear

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


def _check(module: nn.Module) -> None:
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"Expecting module to be Float8Linear but found {type(module)}; call convert_to_float8_training first"
        )
    kinds = module.scaling_type_input, module.scaling_type_grad_output
    assert kinds == (ScalingType.DYNAMIC,) * 2, f"inputs and gradients must be scaled dynamically, got {kinds}"


def _options(config: Float8LinearConfig) -> tuple[Any, ...]:
    """The options of the three products."""
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return (config.emulate, config.pad_inner_dim, *gemms)


class Float8ColwiseParallel(ColwiseParallel):
    """Shards a Float8Linear by outputs. Raises ValueError for another module, AssertionError if its inputs or gradients
    are not cast."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module)
        return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """Shards a Float8Linear by inputs. Raises ValueError for another module, AssertionError if its inputs or gradients
    are not cast."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module)
        return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """Distributes the inputs of a module with float8 layers.

    float8_dtype              float8_e4m3fn; the layers know their own
    fwd_config_submodule_fqn  name of a float8 layer in the module; by default every one is looked at

    Raises NotImplementedError for another dtype, AssertionError for a module without float8 layers, or with layers of
    different options.
    """

    def __init__(
        self, *, input_layouts: Any = None, desired_input_layouts: Any = None, input_kwarg_layouts: Any = None,
        desired_input_kwarg_layouts: Any = None, use_local_output: bool = False,
        float8_dtype: torch.dtype = torch.float8_e4m3fn, fwd_config_submodule_fqn: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            input_layouts=input_layouts, desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts, desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )  # fmt: skip
        if float8_dtype is not torch.float8_e4m3fn:
            raise NotImplementedError(
                f"PrepareFloat8ModuleInput: float8_dtype must be float8_e4m3fn, got {float8_dtype}"
            )
        self.float8_dtype, self.fwd_config_submodule_fqn = float8_dtype, fwd_config_submodule_fqn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        one = self.fwd_config_submodule_fqn
        among = module.modules() if one is None else [module.get_submodule(one)]
        found = {_options(layer.config) for layer in among if isinstance(layer, Float8Linear)}
        where = type(module).__name__ if one is None else f"submodule {one!r}"
        assert len(found) == 1, (
            f"PrepareFloat8ModuleInput: {where} must have float8 layers with the same options, got {found or 'none'}"
        )
        return super()._apply(module, device_mesh)
