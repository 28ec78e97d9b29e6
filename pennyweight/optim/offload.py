"""CPU offload: optimizer states and steps on the CPU for parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..support.arguments import show
from ..support.errors import ArgumentTypeError


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` on copies of the parameters in host memory, so that its states take no GPU memory.

    params             parameters or groups, as in torch.optim
    offload_gradients  free each gradient after copying it; gradients then do not accumulate over backward passes
    minimal_size       smaller parameters are not offloaded
    kwargs             for ``optimizer_class``; torch.optim.AdamW gets fused=True by default

    CPU parameters are not copied; for them this is ``optimizer_class`` itself. Gradients are copied on a separate
    stream during the backward pass. That part was written without a GPU and is not tested.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
        offload_gradients: bool = False, minimal_size: int = 4096, **kwargs: Any,
    ) -> None:  # fmt: skip
        if optimizer_class is torch.optim.AdamW and not {"fused", "foreach"} & kwargs.keys():
            kwargs["fused"] = True
        if not callable(optimizer_class):
            raise ArgumentTypeError(
                f"optimizer_class must be a class such as torch.optim.AdamW, got {show(optimizer_class)}"
            )
        groups = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [
            {**g, "params": [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])} for g in groups
        ]
        self._streams: dict[torch.device, Any] = {}
        self._hosts: dict[Tensor, Tensor] = {}
        self._ready: dict[Tensor, Any] = {}  # parameters whose gradient was copied to the host, in order
        for p in (p for group in groups for p in group["params"]):
            if p.device.type != "cpu" and p.numel() >= minimal_size and p.requires_grad:
                self._offload(p, offload_gradients)
        hosted = [{**group, "params": [self._hosts.get(p, p) for p in group["params"]]} for group in groups]
        self.inner = optimizer_class(hosted, **kwargs)
        super().__init__(groups, self.inner.defaults)
        self.state = self.inner.state

    def _offload(self, p: Tensor, free: bool) -> None:
        device = p.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        host = torch.empty_like(p, device="cpu", pin_memory=True).copy_(p.detach())
        buffer = torch.empty_like(host, pin_memory=True)
        self._hosts[p] = host

        def send(p: Tensor) -> None:
            stream = self._streams[device]
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                assert p.grad is not None
                buffer.copy_(p.grad, non_blocking=True)
                host.grad = buffer
            p.grad.record_stream(stream)
            self._ready.pop(p, None)
            self._ready[p] = stream.record_event()
            if free:
                p.grad = None

        p.register_post_accumulate_grad_hook(send)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of ``optimizer_class``; when it returns, the parameters on their devices are updated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for event in self._ready.values():
            event.synchronize()
        self._sync_options()
        self.inner.step()
        for p in self._ready:
            with self._streams[p.device]:
                p.copy_(self._hosts[p], non_blocking=True)
            self._hosts[p].grad = None
        for stream in self._streams.values():
            stream.synchronize()
        self._ready.clear()
        return loss

    def _sync_options(self) -> None:
        """Pass options changed by a scheduler or the user to the inner optimizer."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name not in ("params", "param_names")})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only used by the constructor, because parameters need host copies. Raises ValueError afterwards."""
        if len(self.param_groups) == len(self.inner.param_groups):
            raise ValueError("CPUOffloadOptimizer takes parameter groups only in its constructor; create a new one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``optimizer_class``; interchangeable with it on any device."""
        self._sync_options()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})
