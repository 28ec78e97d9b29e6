"""QuantOptimizer: any optimizer whose parameters with ``quant_bits`` move onto the values of a quantizer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....distributed.dtensor import is_dtensor
from ..quant_api import _is_linear, quantize_
from .affine_quantizers import UnifTorchaoQuantizer
from .conversion import _is_hf_model, attach_config, config_of
from .prox_maps import ProxMap
from .quantizers import Quantizer

__all__ = ["QuantOptimizer"]


class QuantOptimizer(torch.optim.Optimizer):
    """``base_optimizer`` on latent weights, then ``prox_map`` of these onto the values of ``quantizer``.

    Parameter groups of the base may have these keys:

    quant_bits        quantize this group's parameters with so many bits; 16 and more, or no key: leave them alone
    quant_block_size  elements of a row that share a set of values; default the row, or the tensor

    warmup_steps         steps of the base alone before the first map
    quant_period         steps between updates of the values
    quant_per_channel    a set of values for each row instead of one for the tensor
    quant_shrink         divide by max(1, sum of learning rates) before mapping
    anneal_wd_frac       fraction of the weight decay that decreases with the inverse slope of the map
    group_quantizer_map  quantizers of single groups, by their position among those with ``quant_bits``

    Everything is stored in the base: ``state_dict`` is the base's, with ``num_steps`` and ``cumu_lr`` in the groups and
    ``latent`` and ``quants`` in the states. A closure is evaluated with the mapped weights.
    """

    def __init__(
        self, base_optimizer: torch.optim.Optimizer, quantizer: Quantizer, prox_map: ProxMap, warmup_steps: int = 0,
        quant_period: int = 10, quant_per_channel: bool = False, quant_shrink: bool = False,
        anneal_wd_frac: float = 0.0, group_quantizer_map: dict[int, Quantizer] | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= anneal_wd_frac <= 1:
            raise ValueError(f"anneal_wd_frac must be between 0 and 1, got {anneal_wd_frac}")
        if warmup_steps < 0 or quant_period < 1:
            raise ValueError(
                f"warmup_steps must not be negative and quant_period positive, got {warmup_steps} and {quant_period}"
            )
        self.base_optimizer, self.quantizer, self.prox_map = base_optimizer, quantizer, prox_map
        self.group_quantizer_map = group_quantizer_map
        self.warmup_steps, self.quant_period = warmup_steps, quant_period
        self.quant_per_channel, self.quant_shrink = quant_per_channel, quant_shrink
        self.anneal_wd_frac = anneal_wd_frac
        self._unstepped: dict[Tensor, Tensor] = {}  # latent weights saved before the base has a state for them
        self.num_steps = 0
        for group in self.regularized_param_groups():
            group["cumu_lr"] = 0.0
            if anneal_wd_frac > 0:
                group["initial_wd"] = group["weight_decay"]

    # -- the base's attributes ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "base_optimizer":  # not set yet: while this is copied or unpickled
            raise AttributeError(name)
        return getattr(self.base_optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "step"}  # a scheduler's wrapper of this object's step

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        base = repr(self.base_optimizer).replace("\n", "\n    ")
        quantizer, prox_map = type(self.quantizer).__name__, type(self.prox_map).__name__
        return f"{type(self).__name__} (\n  {base}\n  {quantizer=}\n  {prox_map=}\n)"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; with ``quant_bits`` it is quantized too."""
        self.base_optimizer.add_param_group(param_group)
        group = self.base_optimizer.param_groups[-1]
        if group.get("quant_bits", 16) < 16:
            group.setdefault("cumu_lr", 0.0)
            if self.anneal_wd_frac > 0:
                group.setdefault("initial_wd", group["weight_decay"])

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        return self.base_optimizer.state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any], start_step: int | None = None) -> None:
        """Inverse of :meth:`state_dict`, also of 0.12's with its steps in ``qat_state``. start_step: continue there."""
        rest = dict(state_dict)
        older = rest.pop("qat_state", None)
        mine, theirs = {}, {}
        for key, state in rest["state"].items():
            mine[key] = {k: state[k] for k in ("latent", "quants") if k in state}
            theirs[key] = {k: v for k, v in state.items() if k not in mine[key]}
        self.base_optimizer.load_state_dict({**rest, "state": theirs})
        keys = (key for group in rest["param_groups"] for key in group["params"])
        params = (p for group in self.param_groups for p in group["params"])
        for key, p in zip(keys, params, strict=True):  # the base would convert the values to the parameter's dtype
            self.state[p].update({k: v.detach().to(p.device, copy=True) for k, v in mine.get(key, {}).items()})
        self._unstepped.clear()
        if start_step is not None or older is not None:
            self.num_steps = older["num_steps"] if start_step is None else start_step

    # -- groups ------------------------------------------------------------------------------------------------------

    def regularized_param_groups(self) -> Generator[dict[str, Any], None, None]:
        """The groups with fewer than 16 ``quant_bits``."""
        return (group for group in self.param_groups if group.get("quant_bits", 16) < 16)

    @property
    def num_steps(self) -> int:
        """Steps done; stored in the first quantized group."""
        return next((group.setdefault("num_steps", 0) for group in self.regularized_param_groups()), 0)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        group = next(self.regularized_param_groups(), None)
        if group is not None:
            group["num_steps"] = value

    def _get_quantizer(self, group_idx: int) -> Quantizer:
        return (self.group_quantizer_map or {}).get(group_idx, self.quantizer)

    def get_filter_fns(self, module: nn.Module) -> Generator[Callable[..., bool], None, None]:
        """A filter for :func:`quantize_` for each quantized group: modules that own one of its parameters."""
        for group in self.regularized_param_groups():
            yield partial(_owns_one_of, params={id(p) for p in group["params"]})

    def get_filter_fn(self, module: nn.Module) -> Callable[..., bool]:
        """One filter for all groups (0.12)."""
        return partial(
            _owns_one_of, params={id(p) for group in self.regularized_param_groups() for p in group["params"]}
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. closure: computes gradients and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.num_steps >= self.warmup_steps:
            self.restore_latent_params()
        ours = self._hide_states()
        self.base_optimizer.step()
        for p, state in ours.items():
            self.state[p].update(state)
        if self.num_steps >= self.warmup_steps:
            self._map_params()
        self.num_steps += 1
        return loss

    def _hide_states(self) -> dict[Tensor, dict[str, Any]]:
        """Take out states that have our entries only: optimizers recognize by an empty state that they have not stepped
        yet, for example because a parameter had no gradient."""
        taken = {}
        for p in self._quantized_params():
            state = self.state.get(p)
            if state and state.keys() <= {"latent", "quants"}:
                taken[p] = dict(state)
                state.clear()
        return taken

    def _map_params(self) -> None:
        update = (self.num_steps - self.warmup_steps) % self.quant_period == 0
        for i, group in enumerate(self.regularized_param_groups()):
            group["cumu_lr"] += group["lr"]
            shrink = max(1.0, group["cumu_lr"]) if self.quant_shrink else None
            slope = None
            for p in group["params"]:
                if p.requires_grad:
                    slope = self._map_param(p, self._get_quantizer(i), group, shrink, update)
            if slope:
                if self.anneal_wd_frac > 0:
                    share = slope * self.anneal_wd_frac + (1 - self.anneal_wd_frac)
                    group["weight_decay"] = share * group["initial_wd"]
                group["inv_slope"] = slope
        self._unstepped.clear()

    def _map_param(
        self, p: Tensor, quantizer: Quantizer, group: dict[str, Any], shrink: float | None, update: bool
    ) -> float | None:
        state = self.state[p]
        if "latent" in state:
            state["latent"].copy_(p)
        else:
            state["latent"] = p.detach().clone()
        if shrink is not None:
            p.div_(shrink)
        mine = _local(p)
        x = self._rows(mine, group.get("quant_block_size"))
        dim = -1 if self.quant_per_channel and x.ndim > 1 else None
        if is_dtensor(p) and dim is None:
            raise ValueError("a sharded parameter needs quant_per_channel=True: its values would span ranks")
        q = None
        if update or "quants" not in state:
            bits = group["quant_bits"]
            dtype = torch.promote_types(p.dtype, torch.float32)
            sizes = (quantizer.get_quant_size(bits),)
            values = torch.zeros(sizes if dim is None else (len(x), *sizes), dtype=dtype, device=x.device)
            q = self.quantize_(x, values, quantizer, bits, dim)
            state["quants"] = _like_sharded(values, p)
        slope: Any = self.prox_map.apply_(x, q, _local(state["quants"]), self.num_steps, dim)
        if x.data_ptr() != mine.data_ptr():  # a parameter whose strides do not allow a view as rows
            mine.copy_(x.reshape(mine.shape))
        return slope

    def _rows(self, p: Tensor, block: int | None) -> Tensor:
        """p as a matrix of blocks, or of channels if there is a set of values for each."""
        if block is not None:
            if p.ndim > 2 or p.shape[-1] % block:
                raise ValueError(
                    f"quant_block_size={block} needs vectors or matrices whose rows it divides, got {list(p.shape)}"
                )
            return p.reshape(-1, block)
        return p.flatten(1) if self.quant_per_channel and p.ndim > 2 else p

    @staticmethod
    def quantize_(p: Tensor, quants: Tensor, quantizer: Quantizer, b: int, dim: int | None = None) -> Tensor:
        """p rounded by the quantizer; its values are written to ``quants``."""
        q, values = quantizer.quantize(p, b, dim=dim)
        quants.copy_(values)
        return q

    # -- latent weights ----------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def restore_latent_params(self) -> None:
        """Set the parameters to their latent weights. A parameter that was not mapped yet is its own."""
        for p in self._quantized_params():
            latent = self._unstepped.get(p)
            if latent is None and p in self.state:
                latent = self.state[p].get("latent")
            if latent is not None:
                p.copy_(latent)

    @torch._disable_dynamo
    @torch.no_grad()
    def save_latent_params(self) -> None:
        """Keep the parameters as they are now as latent weights."""
        for p in self._quantized_params():
            if not self.state.get(p):  # optimizers recognize by an empty state that they have not stepped yet
                self._unstepped[p] = p.detach().clone()
            elif "latent" in self.state[p]:
                self.state[p]["latent"].copy_(p)
            else:
                self.state[p]["latent"] = p.detach().clone()

    def _quantized_params(self) -> Generator[Tensor, None, None]:
        return (p for group in self.regularized_param_groups() for p in group["params"] if p.requires_grad)

    # -- conversion --------------------------------------------------------------------------------------------------

    def torchao_convert(self, model: nn.Module, weight_only: bool = False, embed_weight_only: bool = False) -> None:
        """Quantize the model's weights with the config of each group's quantizer, in place, and set it to eval mode.

        weight_only        no activation quantization
        embed_weight_only  none for groups with an embedding either, which is the default unless weights are tied

        A transformers model gets the configs as its ``quantization_config``. Raises ValueError, before the model is
        changed, for quantizers that no config represents: only UnifTorchaoQuantizer and its subclasses are.
        """
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        embedded = {id(m.weight) for m in embeddings}
        linear = {id(m.weight) for m in model.modules() if _is_linear(m) and id(m.weight) not in embedded}
        tied = not embed_weight_only and bool(getattr(model, "_tied_weights_keys", None))
        chosen: list[tuple[Callable[..., bool], Any, bool]] = []
        for i, (group, owns) in enumerate(
            zip(self.regularized_param_groups(), self.get_filter_fns(model), strict=True)
        ):
            params = {id(p) for p in group["params"]}
            if not params:
                continue
            quantizer = self._get_quantizer(i)
            if not isinstance(quantizer, UnifTorchaoQuantizer):
                raise ValueError(
                    f"torchao_convert: group {i} uses {type(quantizer).__name__}, whose values no config represents; "
                    "use UnifTorchaoQuantizer, or keep the float weights, which are on the grid already"
                )
            only = weight_only or (bool(params & embedded) and not tied)
            config = config_of(quantizer, only, group["quant_bits"], group.get("quant_block_size"))
            chosen.append((owns, config, params == linear))
        model.eval()
        self.restore_latent_params()
        if _is_hf_model(model):
            attach_config(model, chosen)
        for owns, config, _ in chosen:
            quantize_(model, config, owns)


def _owns_one_of(module: nn.Module, *args: Any, params: set[int]) -> bool:
    return any(id(p) in params for p in module.parameters(recurse=False))


def _local(p: Tensor) -> Tensor:
    return p.to_local() if is_dtensor(p) else p  # type: ignore[attr-defined]


def _like_sharded(values: Tensor, p: Tensor) -> Tensor:
    """A set of values for each row, sharded as the rows are."""
    if not is_dtensor(p):
        return values
    from torch.distributed.tensor import DTensor, Shard

    where: Any = p
    if any(isinstance(place, Shard) and place.dim != 0 for place in where.placements):
        raise ValueError(f"a parameter may be sharded over its rows, not over another axis, got {where.placements}")
    return DTensor.from_local(values, where.device_mesh, where.placements, run_check=False)
