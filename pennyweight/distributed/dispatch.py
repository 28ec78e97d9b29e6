"""What torch.distributed calls on quantized tensors, and the handler of each call.

torch.distributed cuts, pads, copies and flattens parameters with the ordinary tensor functions but needs different
results (see sharding.py and ddp.py). Such calls can be recognized only by their caller. Importing this module registers
the handlers with core/distributed_hooks.py, which does so at the first such call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call_site import caller
from ..core.distributed_hooks import HANDLERS
from ..core.tensor import AffineQuantizedTensor
from . import collectives, ddp, fsdp, sharding

aten = torch.ops.aten
_CALLERS = ("torch.distributed.", "torch.nn.parallel.distributed")
# handler(w, other arguments, kwargs, calling module)
CALLS: dict[Any, Callable[[AffineQuantizedTensor, tuple[Any, ...], dict[str, Any], str], Any]] = {
    torch.chunk: sharding.chunk,
    torch.Tensor.chunk: sharding.chunk,
    torch.narrow: sharding.narrow,
    torch.Tensor.narrow: sharding.narrow,
    torch.Tensor.new_zeros: sharding.new_zeros,
    F.pad: sharding.pad,
    Tensor.copy_: sharding.copy_,
    Tensor.view: fsdp.flatten,
    aten.view.default: ddp.flatten,
    aten.copy_.default: ddp.copy_,
}


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    who = caller(_CALLERS)
    return CALLS[func](args[0], args[1:], kwargs, who) if who else NotImplemented


HANDLERS.update(dict.fromkeys(CALLS, _dispatch))
HANDLERS.update(dict.fromkeys(("c10d", "_c10d_functional"), collectives.collective))
HANDLERS["fsdp_pre_all_gather"] = fsdp.all_gather_inputs
HANDLERS["fsdp_post_all_gather"] = fsdp.all_gather_output
