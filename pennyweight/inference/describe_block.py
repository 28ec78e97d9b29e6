"""Describes a block by an observed call: records calls of it, with and without a mask, and recognizes its steps."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..support.errors import Refusal
from .block_description import Arguments, BlockDescription
from .detect_changes import attributes, module_classes
from .examples import Observed, Random, signature, zeros
from .query_graph import leaves_of
from .recognize_block import Found, recognize
from .trace_block import Graph, Value, record, replay, tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH_LAYER = ("src", "src_mask", "src_key_padding_mask", "is_causal")  # arguments of nn.TransformerEncoderLayer
# Options of transformers models that are passed on to the blocks, and do not change what those compute
UNUSED = ("use_cache", "output_hidden_states", "return_dict")
ROWS = 16  # more tokens than this are cut if nothing else has their number


class CacheProbe:
    """Stands for a cache in a recorded call: holds nothing, and records what it is given."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, ...]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or any(v is not None for v in kwargs.values()):
            raise Refusal("it passes more than keys, values and its index to the cache")
        self.updates.append((keys, values, layer))
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


def is_cache(value: Any) -> bool:
    return callable(getattr(value, "update", None)) and hasattr(value, "get_seq_length")


def describe_block(name: str, block: nn.Module, observed: Observed) -> BlockDescription:
    """The description of a block. Raises Refusal with the reason if it has none."""
    given = dict(observed.arguments)
    names = signature(block)
    hidden = next(iter(given), "")
    x = given.get(hidden)
    if not isinstance(x, Tensor) or x.ndim != 3 or x.dtype not in DTYPES:
        raise Refusal("its first argument is not a tensor [batch, tokens, channels] of float32, bfloat16 or float16")
    if x.device.type != "cpu":
        raise Refusal(f"it runs on {x.device.type}; fused blocks run on the CPU")
    first = getattr(getattr(block, "self_attn", None), "batch_first", True) if is_torch_layer(block) else True
    batch, tokens, width = x.shape
    if first and tokens > ROWS and not any(isinstance(v, (Tensor, tuple)) for n, v in given.items() if n != hidden):
        tokens = ROWS // 2 + 1
    random = Random(0)
    given[hidden] = random.normal((batch, tokens, width)).to(x.dtype)
    cache = next((n for n, v in given.items() if is_cache(v)), "")
    mask = "" if is_torch_layer(block) else _mask_name(given, names)
    if is_torch_layer(block):
        given = {hidden: given[hidden]}

    plain, _ = _record(block, {**given, mask: None} if mask else given, cache)
    across = _states_mask_name(given, names)
    has_sdpa = any(op.name == "scaled_dot_product_attention" for op in plain.ops)
    found = recognize(plain, hidden, _output(plain)[0], bool(cache), first)
    causal, plain_mask = found.causal, found.mask
    if mask:
        allowed = random.uniform((batch, 1, tokens, tokens)) < 0.7
        allowed |= torch.eye(tokens, dtype=torch.bool, device="cpu")
        given[mask] = allowed if has_sdpa else zeros(allowed.shape).masked_fill(~allowed, -1e4).to(x.dtype)
    if found.cross is not None and across:
        allowed = random.uniform((batch, 1, tokens, given[found.cross.states].shape[1])) < 0.7
        allowed[..., 0] = True
        given[across] = allowed if has_sdpa else zeros(allowed.shape).masked_fill(~allowed, -1e4).to(x.dtype)
    graph, probe = _record(block, given, cache)
    output, kind = _output(graph)
    found = recognize(graph, hidden, output, bool(cache), first)
    mask, bias = _used_masks(found, mask)
    causal = causal or (bias != "" and _is_causal(plain_mask, bias))
    probes = [] if probe is None else _probes(probe)
    layer = _layer(probes[0]) if probes and found.cached else 0
    arguments = _arguments(given, names, hidden, (mask, bias), cache, found, output, first)
    cross = None
    if found.cross is not None:
        if probes and len(probes) < 2:
            raise Refusal("it has cross-attention, but its cache is not an EncoderDecoderCache")
        if found.cross.mask is not None and found.cross.mask.name != across:
            raise Refusal("the mask of cross-attention is computed in the block")
        arguments = replace(
            arguments, states=found.cross.states, states_selects=found.cross.selects,
            states_mask="" if found.cross.mask is None else across,
        )  # fmt: skip
        cross = replace(found.cross.part, layer=_layer(probes[1]) if probes else 0)
    return BlockDescription(
        name, found.steps, found.widths, arguments, found.heads, causal, found.cached, found.cut, found.kept, layer,
        _attention(block), kind, x.dtype, module_classes(block),
        tuple((name, tuple(p.shape)) for name, p in block.named_parameters()), tuple(attributes(block)),
        cross,
    )  # fmt: skip


def _mask_name(given: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in (*given, *names):
        value = given.get(name)
        if "mask" in name and not name.startswith(("encoder", "head", "cross")):
            if value is None or (isinstance(value, Tensor) and value.ndim == 4):
                return name
            raise Refusal(f"{name} is a {type(value).__name__}, not a tensor [batch, heads, tokens, keys]")
    return ""


def _states_mask_name(given: dict[str, Any], names: tuple[str, ...]) -> str:
    """The mask of cross-attention."""
    return next((n for n in (*given, *names) if "mask" in n and n.startswith(("encoder", "cross"))), "")


def is_pair(cache: Any) -> bool:
    """Whether it is transformers' pair of caches, of attention and of cross-attention."""
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and type(cache) is library.EncoderDecoderCache


def _probe(cache: Any) -> Any:
    if not is_pair(cache):
        return CacheProbe()
    library = sys.modules["transformers.cache_utils"]
    made = library.EncoderDecoderCache(library.DynamicCache(), library.DynamicCache())
    made.self_attention_cache, made.cross_attention_cache = CacheProbe(), CacheProbe()
    return made


def _probes(probe: Any) -> list[CacheProbe]:
    return [probe.self_attention_cache, probe.cross_attention_cache] if is_pair(probe) else [probe]


def _record(block: nn.Module, given: dict[str, Any], cache: str) -> tuple[Graph, Any]:
    probe = _probe(given[cache]) if cache else None
    arguments = {**given, cache: probe} if cache else given
    try:
        return record(block, arguments), probe
    except Refusal:
        raise
    except Exception as error:  # the code of any model; the reason is shown
        raise Refusal(f"its forward failed while it was recorded: {type(error).__name__}: {error}") from error


def _output(graph: Graph) -> tuple[Value, tuple[str | None, ...] | None]:
    out = graph.output
    if isinstance(out, Value):
        return out, None
    if isinstance(out, tuple) and out and isinstance(out[0], Value):
        rest = [v for v in out[1:] if not (v is None or (isinstance(v, Value) and v.argument))]
        if not rest:
            return out[0], ("", *(None if v is None else v.name for v in out[1:]))
    raise Refusal("it returns more than its hidden states")


def _used_masks(found: Found, mask: str) -> tuple[str, str]:
    """Names of the arguments for the mask and for a bias that is added with it."""
    value = found.mask
    if value is None:
        return "", ""
    if value.argument and value.name == mask:
        return mask, ""
    leaves = leaves_of(value)
    biases = {v.name for v in leaves if v.name != mask and v.tensor.ndim == 4 and v.tensor.is_floating_point()}
    if len(biases) == 1 and {v.name for v in leaves} == biases | {mask}:
        return mask, biases.pop()
    raise Refusal("the mask of attention is computed in the block")


def _is_causal(value: Value | None, bias: str) -> bool:
    """Whether a mask that is computed from the bias alone excludes later tokens."""
    if value is None:
        return False
    (leaf,) = [v for v in leaves_of(value) if v.name == bias]
    scores = replay(value, {leaf: zeros(leaf.shape)})
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
    return bool(later.any()) and bool((scores[..., later] < -6e4).all())


def is_torch_layer(block: nn.Module) -> bool:
    """nn.TransformerEncoderLayer, whose masks have their own meaning."""
    return isinstance(block, nn.TransformerEncoderLayer)


def _layer(probe: CacheProbe) -> int:
    if len(probe.updates) != 1:
        raise Refusal(f"it updates the cache {len(probe.updates)} times")
    layer = probe.updates[0][2]
    if type(layer) is not int:
        raise Refusal("its index in the cache is not a number")
    return layer


def _arguments(
    given: dict[str, Any], names: tuple[str, ...], hidden: str, masks: tuple[str, str], cache: str, found: Found,
    output: Value, first: bool,
) -> Arguments:  # fmt: skip
    rotary = ""
    if found.cos_sin != ("", ""):
        rotary, _, place = found.cos_sin[0].rpartition(".")
        if found.cos_sin != (f"{rotary}.0", f"{rotary}.1") or place != "0":
            raise Refusal("cos and sin are not passed as one pair")
    across = () if found.cross is None else (found.cross.states, found.cross.mask.name if found.cross.mask else "")
    roles = {hidden, rotary, cache, *masks, *across}
    if names == TORCH_LAYER:
        return Arguments(names, hidden, names[1], True, names[2], unused=frozenset(names[3:]), batch_first=first)
    used = {leaf.name.partition(".")[0] for leaf in leaves_of(output)}
    unused, constants = set(UNUSED), {}
    for name, value in given.items():
        if name in roles or name in unused:
            continue
        if isinstance(value, Tensor):
            if name in used:
                raise Refusal(f"it computes with its argument {name}")
            unused.add(name)
        elif value is None or isinstance(value, (bool, int, float, str)):
            constants[name] = value
        elif any(True for _ in tensors(value)):
            raise Refusal(f"its argument {name} has no role in a fused block")
    mask, bias = masks
    return Arguments(
        names, hidden, mask, found.selects, "", rotary, cache, bias, unused=frozenset(unused), constants=constants
    )


def _attention(block: nn.Module) -> tuple[str, str]:
    """The module whose config holds the choice of the attention function in transformers, and the choice."""
    for path, module in block.named_modules():
        choice = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(choice, str):
            return path, choice
    return "", ""
