"""``quantization_config`` of compressed-tensors: finds a layer's scheme and converts its fields.

    {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": {..}, "input_activations": {..} or null,
                                   "format": ..}},
     "ignore": ["lm_head"]}

A layer's group is the one with its name as a target; else the first, in alphabetical order, of the patterns ("re:..")
that match its name; else the one with class targets, whose classes a file does not contain. A single group needs no
names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ...core.formats import E2M1, E2M3, E4M3, E8M0, Format, get_format
from ...core.spec import NVFP4, ActivationSpec, QuantSpec
from ...planning.name_patterns import NamePattern
from .base import FLOATS, Config, setting

E8M0_SCALE = QuantSpec(E8M0, (1,), scale=None)
FLOAT_OF_BITS = {4: E2M1, 6: E2M3, 8: E4M3}
_MAX_GROUPS = 10_000
_MAX_PATTERNS = 1 << 18  # characters in total
# Limits on matching, in steps of NamePattern: the first is about 0.2 s, plus the second for each layer
_MAX_WORK, _MORE_WORK = 300_000, 3_000
_MAX_GROUP_SIZE = 1 << 20

# The scale of NVFP4 groups: e4m3 / global_scale. The product with the float64 reciprocal, rounded to float32, equals
# the float32 quotient: two roundings have a relative error of 2**-52, and no quotient of float32 numbers is closer than
# 2**-49 to the midpoint of two float32 numbers.
NVFP4_SCALE = QuantSpec(E4M3, None, torch.float64)


@dataclass(frozen=True)
class Kind:
    """A way in which weights are stored, see compressed_tensors.py.

    forms       ``format`` in the config; the first is written
    type, bits  of the weights, in the config
    codes       ending and dtype of the stored codes
    scales      dtypes of the stored scale
    spec        spec of the weight, if the kind determines it
    """

    forms: tuple[str, ...]
    type: str
    bits: tuple[int, ...]
    codes: tuple[str, torch.dtype]
    scales: tuple[torch.dtype, ...] = FLOATS
    spec: QuantSpec | None = None


_INTS, _E4M3 = (2, 3, 4, 5, 6, 7, 8), torch.float8_e4m3fn
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_FP4, _FP8 = ("weight_packed", torch.uint8), ("weight", _E4M3)
KINDS = {
    "packed": Kind(("pack-quantized",), "int", _INTS, ("weight_packed", torch.int32)),
    "int": Kind(("int-quantized", "naive-quantized"), "int", _INTS, ("weight", torch.int8)),
    "float": Kind(("float-quantized", "naive-quantized"), "float", (8,), _FP8),
    "nvfp4": Kind(("nvfp4-pack-quantized",), "float", (4,), _FP4, (_E4M3,), QuantSpec(E2M1, (16,), NVFP4_SCALE)),
    "mxfp4": Kind(("mxfp4-pack-quantized",), "float", (4,), _FP4, _EXPONENTS, QuantSpec(E2M1, (32,), E8M0_SCALE)),
    "mxfp6": Kind(("mxfp6-pack-quantized",), "float", (6,), _FP4, _EXPONENTS, QuantSpec(E2M3, (32,), E8M0_SCALE)),
    "mxfp8": Kind(("mxfp8-quantized",), "float", (8,), _FP8, _EXPONENTS, QuantSpec(E4M3, (32,), E8M0_SCALE)),
}
_KIND_OF = {(form, kind.type): name for name, kind in KINDS.items() for form in kind.forms}
# format of the codes -> kind, with e8m0 scales
MX = {kind.spec.format: name for name, kind in KINDS.items() if kind.spec and kind.spec.scale == E8M0_SCALE}
# Activation rules by which its runtime chooses the scale of a block. For e4m3 it rounds absmax up from 1.75 * 2**n,
# "mx_rceil" from just above that.
_MX_RULES = {E2M1: "mx_even", E2M3: "mx_even", E4M3: "mx_rceil"}


@dataclass(frozen=True)
class Args:
    """How weights or activations are quantized: the fields of QuantizationArgs that affect values."""

    bits: int
    type: str
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    dynamic: bool | str
    scale_dtype: str | None

    @property
    def format(self) -> Format:
        return get_format(f"int{self.bits}") if self.type == "int" else FLOAT_OF_BITS[self.bits]


@dataclass(frozen=True)
class Group:
    """One of ``config_groups`` that quantizes weights."""

    name: str
    kind: str
    weights: Args
    act: ActivationSpec | None
    local: bool  # NVFP4 inputs: group scales are dynamic, the global scale is stored


class Groups:
    """All groups, and their layers; ``known``: names of all layers that are stored quantized.

    Raises ValueError naming the group.
    """

    def __init__(self, config: Config, known: Collection[str]) -> None:
        _refuse_more(config)
        raw = setting(config, "config_groups", dict, {})
        if len(raw) > _MAX_GROUPS:
            raise ValueError(f"{len(raw)} config_groups; the maximum is {_MAX_GROUPS}")
        default = setting(config, "format", str, "dense")
        self.groups: list[Group] = []
        self.targets: dict[str, Group] = {}  # for a target of two groups the later one wins, as in compressed-tensors
        for name, scheme in raw.items():
            group, targets = _group(f"config_groups.{name[:60]}", scheme, default)
            if group is not None:
                self.groups.append(group)
                self.targets.update(dict.fromkeys(targets, group))
        self.ignored = set(_strings("quantization_config", config, "ignore"))
        self.patterns = sorted(t for t in self.targets if t.startswith("re:"))
        if sum(map(len, self.patterns)) > _MAX_PATTERNS:
            raise ValueError(f"{len(self.patterns)} patterns; the maximum total length is {_MAX_PATTERNS} characters")
        self.compiled: dict[str, NamePattern] = {}
        self.left = _MAX_WORK + _MORE_WORK * len(known)
        others = [t for t in self.targets if not t.startswith("re:") and "." not in t and t not in known]
        self.classes = {t: self.targets[t] for t in others}
        self.class_groups = {g.name: g for g in self.classes.values()}

    def of(self, layer: str) -> Group:
        """The group of a layer that is stored quantized."""
        if layer in self.ignored:
            raise ValueError('is stored quantized, but listed in "ignore" of the config')
        if len(self.groups) == 1:
            return self.groups[0]
        if layer in self.targets:
            return self.targets[layer]
        for target in self.patterns:
            if self._matches(target[3:], layer):
                return self.targets[target]
        found = self.class_groups
        if len(found) != 1:
            why = f"classes {sorted(self.classes)[:8]} belong to several groups" if found else "and none names a class"
            raise ValueError(f"no target of the {len(self.groups)} config_groups matches its name, {why}")
        return next(iter(found.values()))

    def _matches(self, text: str, layer: str) -> bool:
        found = self.compiled.get(text)
        if found is None:
            found = self.compiled[text] = NamePattern(text)
            self.left -= len(text)
        before = found.work
        matched = found.matches(layer)
        self.left -= found.work - before
        if self.left < 0:
            raise ValueError(f"the patterns of config_groups take too long to match; last pattern: {text[:60]!r}")
        return matched


def _refuse_more(config: Config) -> None:
    """Reject config fields that change the meaning of the stored tensors and are not supported."""
    if config.get("transform_config"):
        raise ValueError("transform_config: weights are rotated and inputs must be too, which is not supported")
    sparsity = config.get("sparsity_config") or {}
    kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if kind != "dense":
        raise ValueError(f"sparsity_config: format {str(kind)[:40]!r} is not supported; save without compression")


def _strings(what: str, config: Config, key: str) -> list[str]:
    value = setting(config, key, list, [], what=what)
    if not all(isinstance(v, str) for v in value):
        raise ValueError(f"{what}: {key} must be a list of names")
    return value


def _group(what: str, scheme: Any, default: str) -> tuple[Group | None, list[str]]:
    if isinstance(scheme, list):
        raise ValueError(f"{what} is a preset name; save the config with explicit schemes")
    if not isinstance(scheme, dict):
        raise ValueError(f"{what} must be an object")
    targets = _strings(what, scheme, "targets")
    if scheme.get("weights") is None:
        return None, targets
    if scheme.get("output_activations") is not None:
        raise ValueError(f"{what}: output_activations are not supported: layer outputs are not quantized")
    weights = _args(f"{what}.weights", scheme["weights"])
    if weights.dynamic is not False:
        raise ValueError(f"{what}.weights: dynamic weights are not stored")
    if weights.type == "float" and not weights.symmetric:
        raise ValueError(f"{what}.weights: floats have no zero point; symmetric must be true")
    form = setting(scheme, "format", str, default, what=what)
    kind = _KIND_OF.get((form, weights.type))
    if kind is None:
        known = ", ".join(sorted({f for f, t in _KIND_OF if t == weights.type}))
        raise ValueError(f"{what}: format {form[:40]!r} with {weights.type} weights is not supported; known: {known}")
    if weights.bits not in KINDS[kind].bits:
        raise ValueError(f"{what}: format {form!r} does not support {weights.type} weights of {weights.bits} bits")
    spec = KINDS[kind].spec
    if spec is not None and spec.block is not None and (weights.group,) != spec.block:
        raise ValueError(f"{what}: format {form!r} has groups of {spec.block[0]}, but the config says {weights.group}")
    act, local = None, False
    if scheme.get("input_activations") is not None:
        args = _args(f"{what}.input_activations", scheme["input_activations"])
        act, local = activation(f"{what}.input_activations", args), args.dynamic == "local"
    return Group(what, kind, weights, act, local), targets


def _args(what: str, raw: Any) -> Args:
    if not isinstance(raw, dict):
        raise ValueError(f"{what} must be an object")
    bits, kind = setting(raw, "num_bits", int, 8, what=what), setting(raw, "type", str, "int", what=what).lower()
    group = setting(raw, "group_size", int, what=what)
    block = setting(raw, "block_structure", (list, str), what=what)
    if isinstance(block, str):  # "128x128" in old files
        block = [int(n) if n.isascii() and n.isdigit() and len(n) < 9 else 0 for n in block.split("x")]
    if block is not None and (len(block) != 2 or not all(type(n) is int and 0 < n <= _MAX_GROUP_SIZE for n in block)):
        raise ValueError(f"{what}: block_structure must be two positive sizes")
    if group is not None and not (group == -1 or 0 < group <= _MAX_GROUP_SIZE):
        raise ValueError(f"{what}: group_size must be positive, or -1 for a whole row, got {group}")
    inferred = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = setting(raw, "strategy", str, inferred, what=what).lower()
    if strategy not in ("tensor", "channel", "group", "block", "token", "tensor_group"):
        raise ValueError(f"{what}: strategy {strategy[:40]!r} is not supported")
    if strategy in ("group", "tensor_group") and (group is None or group < 1):
        raise ValueError(f"{what}: strategy {strategy!r} needs a positive group_size, got {group}")
    if (strategy == "block") != (block is not None):
        raise ValueError(f"{what}: strategy {strategy!r} and block_structure {block} must be used together")
    if kind not in ("int", "float") or (kind == "float" and bits not in FLOAT_OF_BITS) or not 2 <= bits <= 8:
        raise ValueError(f"{what}: {bits} bits of type {kind[:40]!r} are not supported")
    dynamic = setting(raw, "dynamic", (bool, str), False, what=what)
    if isinstance(dynamic, str) and (dynamic.lower(), strategy) != ("local", "tensor_group"):
        raise ValueError(f"{what}: dynamic {dynamic[:40]!r} with strategy {strategy!r} is not supported")
    return Args(
        bits, kind, setting(raw, "symmetric", bool, True, what=what), strategy, group,
        None if block is None else (block[0], block[1]), dynamic if isinstance(dynamic, bool) else "local",
        setting(raw, "scale_dtype", str, what=what),
    )  # fmt: skip


def activation(what: str, a: Args) -> ActivationSpec:
    """The ActivationSpec of inputs.

    NVFP4 inputs ("local") have a stored global scale above the group scales; here the global scale is computed from the
    input, and the stored one is ignored.
    """
    if a.type == "float" and not a.symmetric:
        raise ValueError(f"{what}: floats have no zero point; symmetric must be true")
    if a.strategy == "tensor_group":
        if (a.bits, a.type, a.group) != (4, "float", 16) or a.dynamic is False:
            raise ValueError(f"{what}: strategy 'tensor_group' needs 4-bit floats in dynamic groups of 16")
        return ActivationSpec(NVFP4)
    if a.strategy == "group" and a.type == "float" and (a.bits < 8 or a.scale_dtype in ("torch.uint8", "uint8")):
        if a.group != 32 or not a.dynamic:
            raise ValueError(f"{what}: MX inputs must have dynamic scales in groups of 32, not {a.group}")
        return ActivationSpec(QuantSpec(a.format, (32,), E8M0_SCALE), "dynamic", _MX_RULES[a.format])
    blocks = {"token": (-1,), "tensor": None, "group": (a.group,)}
    if a.strategy not in blocks or (a.type == "float" and a.bits < 8):
        raise ValueError(f"{what}: {a.bits}-bit {a.type} inputs with strategy {a.strategy} are not supported")
    if not a.dynamic and a.strategy != "tensor":
        raise ValueError(f"{what}: static inputs need a per-tensor scale, but the config says strategy {a.strategy!r}")
    spec = QuantSpec(a.format, blocks[a.strategy], torch.float32, zero_point=not a.symmetric)  # type: ignore[arg-type]
    return ActivationSpec(spec, "dynamic" if a.dynamic else "static")
