"""Inference engines and the weight schemes that each reads, as data.

One table, :data:`ROWS`, says for each kind of scheme and each engine in which file format the engine reads it exactly,
or why it does not and which config comes nearest. ``quantize_(..., for_=engine)`` and ``convert(..., for_=engine)``
check against it before anything is computed, and the table of docs/serving.md is generated from it. Each row is tested
by loading its file into the engine (tests/engines).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core import blocks
from ..core.describe_spec import describe, describe_activation
from ..core.spec import ActivationSpec, QuantSpec
from ..support.arguments import did_you_mean
from .config_resolution import PlanError
from .parameters import is_linear
from .plan import PlanRow
from .scheme import Scheme

CT, GPTQ, GPTQ2, AWQ, FP8, GGUF, ONNX = "compressed-tensors", "gptq", "gptq_v2", "awq", "fp8", "gguf", "onnx"


@dataclass(frozen=True)
class Engine:
    """An inference engine.

    title    its name in tables and messages
    formats  file formats that it reads, the preferred one first
    fuses    whether it computes q, k, v and gate, up as one layer each, whose parts must have one scheme
    version  the release that the table was tested with
    """

    title: str
    formats: tuple[str, ...]
    version: str
    fuses: bool = False


ENGINES = {
    "vllm": Engine("vLLM on a CPU", (CT, GPTQ, AWQ), "0.32.0", fuses=True),
    "vllm-gpu": Engine(
        "vLLM on a GPU", (CT, GPTQ, AWQ, FP8), "0.32.0, selection code only, compute capability 9.0", True
    ),
    "transformers": Engine("transformers", (CT, FP8), "5.10.4 and 5.23.0 with compressed-tensors 0.20.0"),
    "llama.cpp": Engine("llama.cpp", (GGUF,), "llama-cpp-python 0.3.36"),
    "onnxruntime": Engine("onnxruntime", (ONNX,), "1.31.1"),
    "openvino": Engine("OpenVINO", (ONNX,), "2026.4.1"),
}


@dataclass(frozen=True)
class Reads:
    """The engine reads the scheme from files of that format. note: what else it does, such as rounding the inputs."""

    format: str
    note: str = ""


@dataclass(frozen=True)
class Refuses:
    """The engine does not read the scheme. why: one sentence; nearest: the short name of a config that it reads."""

    why: str
    nearest: str


Verdict = Reads | Refuses


@dataclass(frozen=True)
class SpecRow:
    """A row of the table: the schemes whose words (see :func:`words`) are among those listed; () is any.

    text     the schemes in words
    example  short name of such a config
    engines  verdict by engine
    """

    text: str
    example: str
    engines: Mapping[str, Verdict]
    formats: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    scale: tuple[str, ...] = ()
    act: tuple[str, ...] = ("",)
    groups: tuple[int, ...] = field(default=())

    def takes(self, scheme: Scheme) -> bool:
        """Whether the row describes a scheme."""
        spec = scheme.weight
        said = (spec.format.name, zero_of(spec), block_of(spec), scale_of(spec), act_of(scheme.act))
        allowed = (self.formats, self.zero, self.block, self.scale, self.act)
        if self.groups and block_of(spec) == "group" and (spec.block or (0,))[-1] not in self.groups:
            return False
        return all(not some or word in some for some, word in zip(allowed, said, strict=True))


def zero_of(spec: QuantSpec) -> str:
    """ "symmetric", "zero point" (also a constant one off the middle), "offset", or "" for formats without integers."""
    if spec.offset is not None:
        return "offset"
    if spec.format.kind != "int":
        return ""
    middle = 0 if spec.format.signed else 1 << (spec.format.bits - 1)
    return "zero point" if spec.zero_point or spec.mid != middle else "symmetric"


def block_of(spec: QuantSpec) -> str:
    """ "tensor", "row", "group" (of inputs), or "blocks" of several rows."""
    if spec.block is None:
        return "tensor"
    if any(size != 1 for size in spec.block[:-1]):
        return "blocks"
    return "row" if spec.block[-1] == -1 else "group"


def scale_of(spec: QuantSpec) -> str:
    """The format of a quantized scale ("e8m0"), "float16", or "float" for other dtypes."""
    if isinstance(spec.scale, QuantSpec):
        return spec.scale.format.name
    return "float16" if str(spec.scale) == "torch.float16" else "float"


def act_of(act: ActivationSpec | None) -> str:
    """The quantized input: "int8 token", "int8 zero token" (with a zero point), "e4m3 tensor static"; "" for none."""
    if act is None:
        return ""
    block = act.spec.block
    where = "tensor" if block is None else "token" if block[-1] == -1 else "group"
    zero = "zero" if act.spec.zero_point else ""
    return " ".join(filter(None, (act.spec.format.name, zero, where, "static" if act.mode == "static" else "")))


# -- the table ---------------------------------------------------------------------------------------------------------

_NO_KERNEL = Refuses("its kernels for CPUs support weights of 4 bits, and of 8 bits only with 8-bit inputs", "w4a16")
_NO_CPU, _FEW = Refuses("it has no kernel for CPUs", "w4a16"), "it has kernels on few devices"
_NO_CPU8 = Refuses("its build for CPUs has no kernel", "fp8")
_OFFSET = Refuses("it supports integer zero points, and this scheme has offsets in value units", "w4a16")
_GROUPED = Refuses("its 8-bit kernels have one scale per row and token", "w8a8")
_NO_FORMAT = Refuses("no file format that it reads stores such weights", "w4a16")
_MISREAD = Refuses("release 5.23 does not load zero points of compressed-tensors files (5.10.4 does)", "w4a16")
_NO_MX_INPUTS = Refuses("ONNX has no operator for inputs with quantized scales", "w8a8")
_NOT_GGUF = Refuses("no GGUF type stores them", "q8_0")
_BF16 = Reads(CT, "in bfloat16 models")
_ONNX: dict[str, Verdict] = {"onnxruntime": Reads(ONNX), "openvino": Reads(ONNX)}
_MX_INPUTS: dict[str, Verdict] = dict.fromkeys(_ONNX, _NO_MX_INPUTS)
_FP8_INPUTS = {**_ONNX, "openvino": Reads(ONNX, "some inputs rounded to the neighbouring float8 number")}


def _row(
    text: str, example: str, cpu: Verdict, gpu: Verdict, transformers: Verdict, cpp: Verdict | str,
    onnx: Any = None, **match: Any,
) -> SpecRow:  # fmt: skip
    """A row; cpp: a note instead of a verdict is of a GGUF type with the same codes; onnx: verdicts by engine."""
    gguf = Reads(GGUF, cpp) if isinstance(cpp, str) else cpp
    read = _ONNX if onnx is None else onnx
    engines = {"vllm": cpu, "vllm-gpu": gpu, "transformers": transformers, "llama.cpp": gguf, **read}
    return SpecRow(text, example, engines, **match)


def _as(*types: str) -> str:
    return f"the codes as {' or '.join(types)}, scales rounded to float16"


def _widths(*bits: int) -> tuple[str, ...]:
    return tuple(f"{kind}{n}" for n in bits for kind in ("int", "uint"))


_IN_GROUPS, _FLOAT_SCALES = ("group", "row"), ("float", "float16")
_WEIGHTS: dict[str, tuple[Any, ...]] = {"block": _IN_GROUPS, "scale": _FLOAT_SCALES}
_SYMMETRIC, _ZEROS = {**_WEIGHTS, "zero": ("symmetric",)}, {**_WEIGHTS, "zero": ("zero point",)}
_IN_32 = {**_SYMMETRIC, "block": ("group",), "scale": ("float16",), "groups": (32,)}
_MX = {"block": ("group",), "scale": ("e8m0",), "groups": (32,)}
_ROUNDS = "; llama.cpp rounds the inputs itself"
_CT = Reads(CT)
ROWS: tuple[SpecRow, ...] = (
    _row("4 bits in groups of 32, symmetric, float16 scales", "q4_0", _CT, _CT, _CT, "as Q4_0",
         formats=_widths(4), **_IN_32),
    _row("4 bits in groups or per row, symmetric", "w4a16", _CT, _CT, _CT, _as("Q4_0"),
         formats=_widths(4), **_SYMMETRIC),
    _row("4 bits in groups, zero points", "uint4:128", _CT, _CT, _MISREAD, _as("Q4_1"),
         formats=_widths(4), **_ZEROS),
    _row("4 bits in groups, offsets in value units", "int4", _OFFSET, _OFFSET, _OFFSET, _as("Q4_1"),
         formats=_widths(4), zero=("offset",), **_WEIGHTS),
    _row("8 bits in groups of 32, symmetric, float16 scales", "q8_0", _NO_KERNEL, _CT, _CT, "as Q8_0",
         formats=("int8",), **_IN_32),
    _row("8 bits, symmetric", "int8", replace(_NO_KERNEL, nearest="w8a8"), _CT, _CT, _as("Q8_0"),
         formats=_widths(8), **_SYMMETRIC),
    _row("2, 3, 5, 6 or 7 bits, symmetric", "int3", _NO_KERNEL,
         Refuses("its kernels have 4 and 8 bits, and 3 only in part", "w4a16"), _CT, _as("Q4_0", "Q5_0", "Q8_0"),
         formats=_widths(2, 3, 5, 6, 7), **_SYMMETRIC),
    _row("2, 3 or 5 bits, zero points", "uint3", _NO_KERNEL,
         Refuses("its kernels with zero points have 4 bits", "w4a16"), replace(_MISREAD, nearest="int3"),
         _as("Q4_1", "Q5_1"), formats=_widths(2, 3, 5), **_ZEROS),
    _row("6, 7 or 8 bits, zero points", "IntxWeightOnlyConfig", _NO_KERNEL,
         Refuses("its kernels with zero points have 4 bits", "w4a16"), replace(_MISREAD, nearest="int8"),
         Refuses("no GGUF type of more than 5 bits has zero points", "q8_0"), formats=_widths(6, 7, 8), **_ZEROS),
    _row("8-bit weights per row, 8-bit inputs per token", "w8a8", _CT, _CT, _CT, _as("Q8_0") + _ROUNDS,
         formats=("int8",), zero=("symmetric",), block=("row", "tensor"), scale=("float",),
         act=("int8 token", "int8 zero token")),
    _row("8-bit weights per row, 8-bit inputs with one fixed scale", "Int8StaticActivationInt8WeightConfig",
         _CT, _CT, _CT, _as("Q8_0") + _ROUNDS,
         formats=("int8",), zero=("symmetric",), block=("row", "tensor"), scale=("float",),
         act=("int8 tensor static", "int8 zero tensor static")),
    _row("8-bit weights and inputs in groups", "int8-dynamic-grouped", _GROUPED, _GROUPED, _CT, _as("Q8_0") + _ROUNDS,
         formats=("int8",), zero=("symmetric",), scale=("float",), act=("int8 group", "int8 zero group")),
    _row("4-bit weights in groups, 8-bit inputs per token", "8da4w", _CT, Refuses(_FEW, "w4a16"), _CT,
         _as("Q4_0") + _ROUNDS, formats=("int4",), act=("int8 token", "int8 zero token"), **_SYMMETRIC),
    _row("float8 weights per row, float8 inputs per token", "fp8", _CT, _CT, _CT, _NOT_GGUF, _FP8_INPUTS,
         formats=("e4m3",), block=("row",), scale=("float",), act=("e4m3 token",)),
    _row("float8 weights, float inputs", "float8", _NO_CPU8, _CT, _CT, _NOT_GGUF,
         formats=("e4m3",), block=("row", "tensor", "group"), scale=_FLOAT_SCALES),
    _row("float8 weights in blocks of 128×128", "SpecConfig(FP8_BLOCK)",
         Refuses("its kernel for CPUs needs AMX and the fp8 format", "fp8"), Reads(FP8), Reads(FP8), _NOT_GGUF,
         formats=("e4m3",), block=("blocks",), scale=("float",)),
    _row("float8 weights and inputs, one scale per tensor", "float8-dynamic", _NO_CPU8, _CT, _CT, _NOT_GGUF,
         _FP8_INPUTS, formats=("e4m3",), block=("row", "tensor"), scale=("float",),
         act=("e4m3 tensor", "e4m3 tensor static")),
    _row("4-bit weights in groups, float8 inputs per token", "float8-int4", _NO_CPU, Refuses(_FEW, "w4a16"), _CT,
         _as("Q4_0") + _ROUNDS, _FP8_INPUTS, formats=("int4",), act=("e4m3 token",), **_SYMMETRIC),
    _row("NVFP4 weights", "nvfp4", _NO_CPU, _CT, _BF16, Refuses("GGUF's NVFP4 has no scale per tensor", "q4_0"),
         formats=("e2m1",), block=("group",), scale=("e4m3",)),
    _row("MXFP4 weights", "mxfp4", _NO_CPU, _CT, _BF16, "as MXFP4", formats=("e2m1",), **_MX),
    _row("MXFP8 weights", "mxfp8", _NO_CPU8, _CT, _BF16, _NOT_GGUF, formats=("e4m3",), **_MX),
    _row("MXFP8 weights and inputs", "mxfp8-dynamic", _NO_CPU8, _CT, _BF16, _NOT_GGUF, _MX_INPUTS,
         formats=("e4m3",), act=("e4m3 group",), **_MX),
    _row("other weights: fp6, nf4, other MX formats, tables", "nf4", _NO_FORMAT, _NO_FORMAT, _NO_FORMAT, _NOT_GGUF),
    _row("other weights with quantized inputs", "mxfp4-dynamic", _NO_FORMAT, _NO_FORMAT, _NO_FORMAT, _NOT_GGUF,
         _MX_INPUTS, act=()),
)  # fmt: skip


def row_of(scheme: Scheme) -> SpecRow:
    """The row of a scheme; the last ones take every scheme."""
    return next(row for row in ROWS if row.takes(scheme))


def engine_of(name: str) -> Engine:
    """The engine of a name. Raises ValueError with the names that are valid."""
    if name not in ENGINES:
        hint = did_you_mean(name, ENGINES, 1, 0.4)
        raise ValueError(f"unknown engine {name!r}{hint}; known: {', '.join(ENGINES)}")
    return ENGINES[name]


_MULTIPLE = 32  # of inputs and outputs: vLLM's kernels for CPUs with weights of 4 bits; of inputs: GGUF's blocks


def verdict(name: str, scheme: Scheme, shape: Sequence[int] = (), op: str = "linear") -> Verdict:
    """Whether an engine reads a weight.

    shape: the stored shape of the weight, () to judge the scheme alone. op: as in the kernel table ("linear",
    "embedding", "bmm" for experts, "convolution").
    """
    engine = engine_of(name)
    found = row_of(scheme).engines[name]
    if ONNX in engine.formats:
        return found
    if op == "embedding" and GGUF not in engine.formats:
        return Refuses(f"{engine.title} reads embeddings only as floats", "none")
    if op == "bmm" and GGUF not in engine.formats:
        return Refuses("experts that are one parameter have no form in the files that it reads", "none")
    if op not in ("linear", "embedding", "bmm"):
        return Refuses("it reads quantized weights only of linear layers", "none")
    if isinstance(found, Refuses) or not shape:
        return found
    block = scheme.weight.block
    if block is not None and tuple(blocks.padded(block, shape)) != tuple(shape):
        return Refuses(f"blocks of {block[-1]} do not divide its {shape[-1]} inputs", "")
    if name == "llama.cpp" and (shape[-1] % _MULTIPLE or (block is not None and block[-1] % _MULTIPLE not in (0, 31))):
        return Refuses(f"GGUF types have groups of 32, which do not divide groups or rows of {list(shape)}", "q8_0")
    if name == "vllm" and scheme.weight.format.bits == 4 and any(n % _MULTIPLE for n in shape[-2:]):
        return Refuses(f"its 4-bit kernels need multiples of {_MULTIPLE} inputs and outputs, not {list(shape)}", "none")
    return found


def refusal(name: str, layer: str, scheme: Scheme, found: Refuses) -> str:
    """The message for a weight that an engine does not read: layer, scheme, engine, remedy."""
    engine = engine_of(name)
    text = describe(scheme.weight) + ("" if scheme.act is None else f"; {describe_activation(scheme.act)}")
    if found.nearest == "none":
        remedy = f"leave it float, skip={layer.removesuffix('.weight')!r}"
    elif found.nearest:
        remedy = f"use {found.nearest!r}, which it reads"
    else:
        remedy = "choose a group size that divides them, or a scale per row"
    return f"{layer}: {engine.title} does not read {text}: {found.why}; {remedy}"


# -- fused layers ------------------------------------------------------------------------------------------------------

# The parts of layers that engines compute as one, by the last part of their names, and the name of the whole
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def fused_groups(
    modules: Iterable[str], fused: Mapping[str, Sequence[str]] = FUSED, experts: bool = True
) -> dict[str, list[str]]:
    """{name of the fused layer: names of its parts} among module names, for groups of which at least two are there.

    "model.layers.0.self_attn.q_proj" and its k_proj and v_proj are "model.layers.0.self_attn.qkv_proj". All ``experts``
    of a layer ("mlp.experts.7.up_proj") are one: "mlp.experts".
    """
    groups: dict[str, list[str]] = {}
    whole = {part: name for name, some in fused.items() for part in some}
    for module in modules:
        parent, _, last = module.rpartition(".")
        above, _, number = parent.rpartition(".")
        if experts and number.isdecimal() and above.rpartition(".")[2] == "experts":
            groups.setdefault(above, []).append(module)
        elif last in whole:
            groups.setdefault(f"{parent}.{whole[last]}" if parent else whole[last], []).append(module)
    return {name: some for name, some in groups.items() if len(some) > 1}


def check_fused(name: str, schemes: Mapping[str, Scheme | None]) -> str:
    """Why an engine cannot read a mixture: parts of one of its fused layers that have different schemes, or are partly
    float; "" if there is none. schemes: by module name, None where it stays float."""
    if not engine_of(name).fuses:
        return ""
    for whole, modules in fused_groups(schemes).items():
        kinds = {str(schemes[m]) for m in modules}
        if len(kinds) > 1:
            first = modules[0]
            other = next(m for m in modules if str(schemes[m]) != str(schemes[first]))
            said = ["float" if s is None else s.describe() for s in (schemes[first], schemes[other])]
            return (
                f"{first} ({said[0]}) and {other} ({said[1]}): {engine_of(name).title} computes both as one layer, "
                f"{whole}, and reads one scheme for it; give them the same config"
            )
    return ""


# -- plans -------------------------------------------------------------------------------------------------------------


def check_plan(rows: Iterable[PlanRow], name: str) -> str:
    """A sentence on how an engine reads a planned model. Computes nothing. Raises PlanError naming the first weight
    that it does not read, its scheme and a remedy, and for parts of a fused layer with different schemes.

    name: one of :data:`ENGINES`; PlanError with the names for another.
    """
    try:
        engine = engine_of(name)
    except ValueError as error:
        raise PlanError(f"for_={name!r}: {error}") from error
    refused: list[str] = []
    formats: dict[str, str] = {}
    schemes: dict[str, Scheme | None] = {}
    for row in rows:
        place = row.places[0] if row.places else None
        if place is not None and place.own and is_linear(place.module):
            schemes[place.module_name] = row.scheme
        if row.scheme is None or row.site is None:
            continue
        op = next((op for op in row.ops if op != "linear"), "linear")
        found = verdict(name, row.scheme, row.site.shape, op)
        if isinstance(found, Refuses):
            refused.append(refusal(name, row.name, row.scheme, found))
        else:
            formats.setdefault(found.format, row.name)
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise PlanError(refused[0] + more)
    if len(formats) > 1:
        said = ", ".join(f"{layer} in {format}" for format, layer in formats.items())
        raise PlanError(f"{engine.title} reads these weights in different file formats: {said}; use one kind of scheme")
    fused = check_fused(name, schemes)
    if fused:
        raise PlanError(fused)
    format = next(iter(formats), engine.formats[0])
    how = "pennyweight export-onnx" if format == ONNX else f"pennyweight convert --for {name}"
    return f"{engine.title} reads all quantized weights, from a file in the format {format}: {how}"
