"""fuse_(model): for inference, transformer blocks and chains of convolutions run as one native call each, and other
quantized layers frozen.

Only classes of modules change, as with :func:`freeze_`; :func:`thaw_` undoes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..planning.quantize_report import Report, Row
from ..support.errors import Refusal
from .block_description import BlockDescription
from .bound_block import Bound
from .describe_block import describe_block
from .detect_changes import attributes, module_classes, own_class, refusal
from .equal_blocks import described_as
from .examples import Observed, candidates, examples, observe, roots
from .freeze import freeze_, with_scheme
from .fuse_conv_net import FusedConvNet, chained_convolutions, fuse_nets
from .fused_module import FusedModule, Kind, fuse_class_
from .lazy_output import call_alone, computed, lazy_call
from .verify_block import checks_enabled, run_checked, verify, verify_observed

Known = tuple[nn.Module, Observed, BlockDescription]


def _refused(block: nn.Module, description: BlockDescription, args: Any, kwargs: Any) -> str:
    return refusal(block, lambda module: True) or changed(block, description)


def _bind(block: nn.Module, description: BlockDescription, args: Any, kwargs: Any) -> Bound:
    return Bound(block, description)


def _weights(block: FusedBlock) -> list[str]:
    return [product[0] for product in type(block).description.products()]


def _about(block: FusedBlock) -> str:
    return f"one native call for {len(_weights(block))} linear layers and what lies between them"


def changed(block: nn.Module, description: BlockDescription) -> str:
    """Why a block is no longer the one that was recognized, or ""."""
    if module_classes(block) != description.modules:
        return "a module in it was replaced"
    path, choice = description.attention
    if choice and block.get_submodule(path).config._attn_implementation != choice:  # type: ignore[union-attr]
        return "the attention implementation of the model was changed"
    for name, shape in description.shapes:
        path, _, own = name.rpartition(".")
        parameter = block.get_submodule(path)._parameters.get(own)
        if (
            parameter is None
            or tuple(parameter.shape) != shape
            or (name in description.quantized()) != is_quantized(parameter)
        ):
            return f"{name} was replaced"
    if sum(1 for _ in block.named_parameters()) != len(description.shapes):
        return "a parameter was added"
    found = {(path, name): value for path, name, value in attributes(block)}
    for path, name, value in description.attributes:
        if (path, name) not in found or type(found[path, name]) is not type(value) or found[path, name] != value:
            return f"{path}.{name} was changed; call fuse_ again".lstrip(".")
    return ""


class FusedBlock(FusedModule):
    """A transformer block that runs as one native call. Made by :func:`fuse_`, as a subclass of the block's class.

    Calls that native code cannot take run the block's own forward, and are counted in ``pennyweight.fallbacks()`` with
    the reason: training, gradients, autocast, tracing, hooks on inner modules, replaced layers, other arguments.
    """

    fused_kind = Kind("block", "block", _refused, _bind, run_checked, _weights, _about)
    description: BlockDescription

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return FusedModule.forward(self, *args, **kwargs)
        if not args:
            return FusedModule.forward(self, **{name: computed(value) for name, value in kwargs.items()})
        y = None if checks_enabled() else lazy_call(self, args, kwargs)
        return call_alone(self, args, kwargs) if y is None else y


@check_arguments()
def fuse_(model: nn.Module, example: Any = None) -> Report:
    """Convert transformer blocks to :class:`FusedBlock`, convolution nets to :class:`FusedConvNet` and quantized linear
    layers to :class:`FrozenLinear`, in place. Returns a report: a row for each block, fused or with the reason why it
    is not, and one for each quantized parameter.

    example   an input of the model: a tensor, a tuple of arguments, or a mapping of keyword arguments. Default: made
              from the config for models of transformers (also as a part, as in a SentenceTransformer), random rows for
              nn.TransformerEncoder, random images for convolution nets

    The model is run once on the example, to see how it calls its blocks. A block is recognized by what it computes, not
    by its class: norms, attention and gated or plain MLPs around quantized linear layers (docs/fuse.md). It is then run
    beside its own forward on random inputs, masks and caches, and refused if they differ by more than a tolerance: of
    mean |difference| / mean |change to the input|, 1e-4 in float32, 2e-2 in bfloat16 or if inputs are quantized.

    The convolutions of a net with static int8 inputs become chains that hand int8 codes from layer to layer, with
    activations, residual additions and pooling; the outputs are those of the net, to the last bit except where a mean
    or an activation like SiLU rounds differently. The graph is that of torch.fx.

    Parameters, buffers, hooks, ties and the state dict stay the same. :func:`thaw_` undoes it exactly. On a GPU blocks
    and nets are not fused yet, and a note says so.

    >>> import torch, pennyweight as pw
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> report = pw.quantize_(model, "int8")
    >>> x = torch.randn(1, 5, 64)
    >>> before = model(x)
    >>> report = pw.fuse_(model, x)
    >>> torch.allclose(model(x), before, rtol=1e-3, atol=1e-3)
    True
    >>> report = pw.inference.thaw_(model)
    """
    rows: list[Row] = []
    notes: list[str] = []
    elsewhere = sorted({p.device.type for p in model.parameters()} - {"cpu", "meta"})
    if elsewhere:
        notes.append(
            f"the model is on {' and '.join(elsewhere)}: blocks and convolution nets are fused for CPUs only; linear "
            "layers run on the kernels of their device"
        )
    else:
        rows, problem = _fuse(model, example)
        notes += [problem] if problem else []
    frozen = freeze_(model)
    chained = {id(m.weight): m.weight for m in chained_convolutions(model)}
    for row in frozen.rows:
        w = chained.get(id(_parameter(model, row.name)))
        if w is not None and not row.scheme:
            with_scheme(row, w)
            row.kernel, row.note = "chains", ""
    return Report("fuse_", rows + frozen.rows, verb="fused or frozen", notes=notes)


def _fuse(model: nn.Module, example: Any) -> tuple[list[Row], str]:
    """Rows of nets and blocks, and why the model could not be run, or ""."""
    with _evaluating(model):
        rows = list(fuse_nets(model, example))
        blocks = _outside_nets(model, candidates(model))
        for block in blocks.values():
            if isinstance(block, FusedBlock) and changed(block, block.description):
                block.__class__ = block.thawed  # type: ignore[assignment]
        seen, problem = _observed(model, blocks, example) if blocks or not rows else ({}, "")
        known: list[Known] = []
        for name, block in blocks.items():
            rows.append(_row(name, block, _fuse_block(name, block, seen.get(name), known)))
    return rows, problem


def _parameter(model: nn.Module, name: str) -> Any:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(own)


def _outside_nets(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks in no fused net that have quantized linear layers."""
    inside = {id(m) for net in model.modules() if isinstance(net, FusedConvNet) for m in net.modules()}
    return {
        name: block for name, block in blocks.items()
        if id(block) not in inside and any(is_quantized(p) and p.ndim == 2 for p in block.parameters())
    }  # fmt: skip


def _fuse_block(name: str, block: nn.Module, observed: Observed | Refusal | None, known: list[Known]) -> str:
    """Fuse a block; the reason if it is left alone. known: what was recognized, extended."""
    if isinstance(block, FusedBlock):
        return ""
    if observed is None:
        return "the example does not run it; pass example=an input of the model"
    try:
        if isinstance(observed, Refusal):
            raise observed
        if (found := _as_known(name, block, observed, known)) is not None:
            fuse_class_(block, FusedBlock, *found)
            return ""
        description = describe_block(name, block, observed)
        bound = Bound(block, description)
        verify(block, bound, observed)
    except Refusal as refused:
        floats = [path for path, m in block.named_modules() if isinstance(m, nn.Linear) and not is_quantized(m.weight)]
        return f"{floats[0]} is not quantized" if floats else str(refused)
    known.append((block, observed, description))
    fuse_class_(block, FusedBlock, description, bound)
    return ""


def _as_known(
    name: str, block: nn.Module, observed: Observed, known: list[Known]
) -> tuple[BlockDescription, Bound] | None:
    """A block that is built like one that was recognized and checked: its description, after a shorter check."""
    for other, seen, description in known:
        own = described_as(name, block, observed, other, seen, description)
        if own is None:
            continue
        bound = Bound(block, own)
        try:
            verify_observed(block, bound, observed)
        except Refusal:  # recognized by itself, and refused with the reason
            continue
        return own, bound
    return None


def is_quantized(parameter: Any) -> bool:
    return isinstance(parameter, AffineQuantizedTensor)


def _observed(model: nn.Module, blocks: dict[str, nn.Module], example: Any) -> tuple[dict[str, Any], str]:
    """(calls of the blocks, what to tell the user if there are none)"""
    if not blocks:
        return {}, "no transformer blocks with quantized layers were found"
    if example is not None:
        return observe(model, blocks, example), ""
    seen: dict[str, Any] = {}
    problem = ""
    for root, part in roots(model).items():
        inside = {name: block for name, block in blocks.items() if name.startswith(f"{root}." if root else "")}
        if inside:
            calls, missing = _observed_alone(part, inside)
            seen |= calls
            problem = problem or missing
    return seen, problem


def _observed_alone(model: nn.Module, blocks: dict[str, nn.Module]) -> tuple[dict[str, Any], str]:
    """The same for a model without an example: one is made."""
    error: Exception | None = None
    for made in examples(model, next(iter(blocks.values()))):
        try:
            return observe(model, blocks, made), ""
        except Exception as failed:  # an example made from a config may be wrong; the user is told
            error = failed
    because = "" if error is None else f" ({type(error).__name__}: {error})"
    return {}, f"no example input could be made for this model{because}; pass example="


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients and without fused paths that hide layers."""
    training = [m for m in model.modules() if m.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for m in training:
        m.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for m in training:
            m.training = True


def _row(name: str, block: nn.Module, reason: str) -> Row:
    what = "" if reason else "block"
    return Row(name, own_class(block).__name__, (), what, what, 0, 0, note=reason)
