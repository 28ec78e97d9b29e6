"""pw.load: loads a checkpoint into a model, completely or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import prepare
from ..planning.quantize_report import ALGORITHM
from ..quantize.save_pretrained import settle_saving_
from ..support.progress import Callback, Progress, step
from .detect_format import open as open_any
from .file import CheckpointError
from .lazy_checkpoint import Opened
from .manifest import Meta
from .safetensors_file import Entry
from .state_dict import Slot, meta_buffers, slots_of
from .weight_conversions import under_model_names

_LOG = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
# One function that imports report/golden_files.py, of a higher layer; registered by the package
VERIFIER: list[Callable[[], Any]] = []


@overload
def load(
    path: str | os.PathLike[str],
    model: Model,
    *,
    strict: bool = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    names: str | os.PathLike[str] | None = ...,
    allow_pickle: bool = ...,
    mmap: bool = ...,
    verify: bool = ...,
    progress: Progress = ...,
) -> Model: ...
@overload
def load(
    path: str | os.PathLike[str],
    model: None = ...,
    *,
    strict: bool = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    names: str | os.PathLike[str] | None = ...,
    allow_pickle: bool = ...,
    mmap: bool = ...,
    verify: bool = ...,
    progress: Progress = ...,
) -> dict[str, Tensor]: ...
@check_arguments()
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    names: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    mmap: bool = True,
    verify: bool = False,
    progress: Progress = None,
) -> nn.Module | dict[str, Tensor]:
    """Read a checkpoint of any format :func:`open` supports. Return the model, or the state dict if none is given.

    model    filled in place; may be on the meta device, quantized or not. The file's tensors replace the model's,
             including dtypes. Ties of the file and of the model are kept. Quantized weights do not require grad.
    strict   raise an error for names that exist only in the model or only in the file
    device   target device; default: the device of the model's tensors (CPU for meta tensors)
    dtype    dtype of floats, and the dtype quantized tensors represent; default: that of the file, or the model's for a
             GGUF file, whose floats have several dtypes. Codes and scales are unchanged
    names    a TOML file with tensor names, for a GGUF file of an unknown architecture; with a model, tensors of a GGUF
             file have Hugging Face names, without one their own
    allow_pickle   see :func:`open`
    mmap     False: read tensors into their own memory. A mapped file must not be truncated or written in place while
             the model is in use: the process would end by SIGBUS. Replacing the file by a rename is safe
    verify   run the loaded model on the golden outputs next to the checkpoint (see :func:`golden`), and raise
             CheckpointError, with the value and its bound, if the outputs differ. The model is already filled then
    progress a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    Tensors are memory-mapped copy-on-write, and copied only if a kernel needs its own packing or the device is not the
    CPU. Raises CheckpointError; all others are raised before anything in the model has changed.

    >>> import tempfile, torch, pennyweight as pw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pw.save({"a": torch.ones(2, 3)}, folder)
    ...     pw.load(folder)
    {'a': tensor([[1., 1., 1.],
            [1., 1., 1.]])}
    """
    if verify and model is None:
        raise ValueError("load(verify=True) runs the model; pass one, or leave verify out")
    golden = VERIFIER[0]() if verify else None
    expected = None if golden is None else golden.expected_beside(path)  # fails before loading if the file is missing
    with step("load", progress) as advance, open_any(path, allow_pickle=allow_pickle, mmap=mmap) as checkpoint:
        if model is None:
            with torch.inference_mode(False), torch.no_grad():
                state = checkpoint.state_dict()
                moved = {id(t): _to(t, device, dtype) for t in state.values()}
                return {name: moved[id(t)] for name, t in state.items()}
        if checkpoint.format == "gguf":
            from .gguf.reader import under_hf_names

            checkpoint = under_hf_names(checkpoint, names)
        load_opened(checkpoint, model, strict=strict, device=device, dtype=dtype, advance=advance)
    if golden is not None:
        golden.check(model, path, expected)
    return model


def load_opened(
    checkpoint: Opened, model: nn.Module, *, strict: bool, device: torch.device | str | None,
    dtype: torch.dtype | None = None, advance: Callback,
) -> None:  # fmt: skip
    """:func:`load` of an open checkpoint under the names of the model."""
    model_in = getattr(model, "_orig_mod", model)  # torch.compile wraps a module and puts its own prefix on names
    with torch.inference_mode(False), torch.no_grad():  # parameters of inference mode could never require grad again
        slots = slots_of(model_in)
        lost = meta_buffers(model_in) if strict else []
        if lost:
            raise CheckpointError(
                checkpoint.path, lost[0],
                f"{_some(lost)}: non-persistent buffers on the meta device, which no checkpoint contains; initialize "
                "such buffers first, or load with strict=False and fill them after",
            )  # fmt: skip
        checkpoint = under_model_names(checkpoint, model_in, slots)
        source = _match(checkpoint, slots, strict)
        new = _tensors(checkpoint, slots, source, device, dtype, advance)
        _assign(slots, new, checkpoint.path)
    if checkpoint.algorithm:
        setattr(model_in, ALGORITHM, checkpoint.algorithm)  # for the next save
    settle_saving_(model_in)
    quantized = sum(isinstance(t, AffineQuantizedTensor) for t in new.values())
    _LOG.info(
        "load: %d tensors, %d of them quantized, from %s (%s)", len(new), quantized, checkpoint.path, checkpoint.format
    )


def _match(c: Opened, slots: dict[str, Slot], strict: bool) -> dict[str, str]:
    """Model name -> file name of the tensor that fills it. Raises CheckpointError on a mismatch."""
    source = {n: c.aliases.get(n, n) for n in slots if n in c}
    # A float checkpoint of a tied model often holds the tied weight once, under one of its names
    by_tensor: dict[int, str] = {id(slots[n].tensor): stored for n, stored in source.items()}
    missing = []
    for name, slot in slots.items():
        if name not in source and id(slot.tensor) in by_tensor:
            source[name] = by_tensor[id(slot.tensor)]
        elif name not in source:
            missing.append(name)
    if strict:
        extra = [n for n in c if n not in slots]
        said = [f"the model has {_some(missing)}, but the checkpoint does not"] if missing else []
        said += [f"the checkpoint has {_some(extra)}, but the model does not"] if extra else []
        if said:
            remedy = "; load with strict=False to load the matching tensors"
            raise CheckpointError(c.path, (missing or extra)[0], "; ".join(said) + remedy)
    for name, stored in source.items():
        reason = _unfit(slots[name].tensor, c.held[stored].kind)
        if reason is not None:
            raise CheckpointError(c.path, name, reason)
    return source


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unfit(tensor: Tensor, stored: Meta | Entry) -> str | None:
    """Why a stored tensor cannot replace ``tensor``; None if it can."""
    if tuple(tensor.shape) != stored.shape:
        return (
            f"the model has shape {list(tensor.shape)}, the checkpoint {list(stored.shape)}; create the model with the "
            "sizes with which it was saved"
        )
    kind = (tensor.dtype.is_floating_point, tensor.dtype.is_complex)
    if kind != (stored.dtype.is_floating_point, stored.dtype.is_complex) or (
        not any(kind) and tensor.dtype != stored.dtype
    ):
        return f"the model has {tensor.dtype}, the checkpoint {stored.dtype}"
    return None


def _to(t: Tensor, device: Any, dtype: torch.dtype | None) -> Tensor:
    t = t if dtype is None or not t.is_floating_point() else t.to(dtype)
    return t if device is None else t.to(device)


def _tensors(
    c: Opened, slots: dict[str, Slot], source: dict[str, str], device: Any, dtype: torch.dtype | None,
    advance: Callback,
) -> dict[str, Tensor]:  # fmt: skip
    """New tensors by model name: checked, on the target device, packed; tied names share one object."""
    users: dict[str, list[str]] = {}
    for name, stored in source.items():
        users.setdefault(stored, []).append(name)
    new: dict[str, Tensor] = {}
    for stored, names in users.items():
        first = slots[names[0]]
        target = device if device is not None else None if first.tensor.device.type == "meta" else first.tensor.device
        ops = tuple(dict.fromkeys(slots[n].op for n in names))
        wanted = first.tensor.dtype if c.format == "gguf" and dtype is None else dtype
        tensor: Any = _to(c[stored], target, wanted)
        quantized = isinstance(tensor, AffineQuantizedTensor)
        if quantized and tensor.ndim > 1:
            tensor = prepare(tensor, ops)
        if any(slots[n].is_param for n in names):
            trains = not quantized and (tensor.is_floating_point() or tensor.is_complex())
            tensor = nn.Parameter(tensor, trains and any(slots[n].tensor.requires_grad for n in names))
        new |= dict.fromkeys(names, tensor)
        advance(len(new), len(source), names[0])
    _keep_ties(c, slots, new)
    return new


def _keep_ties(c: Opened, slots: dict[str, Slot], new: dict[str, Tensor]) -> None:
    """Keep tied names of the model tied if their tensors in the file are equal.

    If the tensors in the file differ, they are untied, except for a module shared under two names, which has only one
    place for both values: CheckpointError.
    """
    first: dict[int, str] = {}
    for name, tensor in list(new.items()):
        slot = slots[name]
        other = first.setdefault(id(slot.tensor), name)
        if new[other] is tensor:
            continue
        a = new[other]
        plain = not isinstance(a, AffineQuantizedTensor) and not isinstance(tensor, AffineQuantizedTensor)
        if plain and a.dtype == tensor.dtype and a.device == tensor.device and torch.equal(a, tensor):
            new[name] = a
        elif (slots[other].module, slots[other].attr) == (slot.module, slot.attr):
            raise CheckpointError(c.path, name, f"differs from {other}, but both are one tensor of a shared module")


def _assign(slots: dict[str, Slot], new: dict[str, Tensor], path: str) -> None:
    """Assign the tensors to the model. If a module's ``__setattr__`` raises, all assignments are undone. Raises
    CheckpointError if the module does not keep the values."""
    done: list[Slot] = []
    try:
        for name, tensor in new.items():
            slot = slots[name]
            done.append(slot)
            setattr(slot.module, slot.attr, tensor)
            if getattr(slot.module, slot.attr).is_meta and not tensor.is_meta:
                raise CheckpointError(
                    path, name, "was moved to the meta device when it was assigned to the model: call pennyweight.load "
                    "after the block of accelerate's init_empty_weights"
                )  # fmt: skip
    except BaseException:
        for slot in reversed(done):
            slot.put_back()
        raise
