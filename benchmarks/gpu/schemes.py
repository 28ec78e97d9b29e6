"""What is timed and checked, as data: schemes of weights, and the goals of each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _intx(bits: int) -> Callable[[], Any]:
    def config() -> Any:
        import pennyweight as pw
        from pennyweight.planning.configs.by_name import by_name

        if bits > 1:
            return by_name(f"int{bits}", group_size=128)
        return pw.UIntXWeightOnlyConfig(dtype="uint1", group_size=128)  # int1 alone has no positive number

    return config


def _config(name: str, **arguments: Any) -> Callable[[], Any]:
    def config() -> Any:
        import pennyweight as pw

        given = {key: value() if callable(value) else value for key, value in arguments.items()}
        return getattr(pw, name)(**given)

    return config


def _int4() -> Any:
    import torch

    import pennyweight as pw

    return pw.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=pw.PerGroup(64))


def _per_row() -> Any:
    import pennyweight as pw

    return pw.PerRow()


# Short name -> a config
SCHEMES: dict[str, Callable[[], Any]] = {
    "int4": _config("Int4WeightOnlyConfig", group_size=64),
    "int4-symmetric": _int4,
    "int8": _config("Int8WeightOnlyConfig"),
    "int2": _intx(2),
    "int1": _intx(1),
    "float8": _config("Float8WeightOnlyConfig"),
    "nf4": _config("NF4WeightOnlyConfig", double_quant=False),
    "float8-dynamic": _config("Float8DynamicActivationFloat8WeightConfig", granularity=_per_row),
    "int8-dynamic": _config("Int8DynamicActivationInt8WeightConfig"),
    "w4a8": _config("Int8DynamicActivationInt4WeightConfig", group_size=128),
}
# Family of tiles -> schemes that share them, and buckets of rows. int4 has an offset per group, int4-symmetric has none
_ALL = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
TUNED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "int4-offset": (("int4",), _ALL),
    "int4": (("int4-symmetric",), _ALL),
    "int8": (("int8",), _ALL),
    "int2": (("int2",), (8,)),
    "int1": (("int1",), (8,)),
    "float8": (("float8",), (8, 16, 64)),
    "table4": (("nf4",), (8, 16, 64)),
}


@dataclass(frozen=True)
class Goal:
    """A case of the benchmark. goal, stretch: times the speed of cuBLAS bf16; share: of the copy rate, of its bytes.

    anchor  the best published ratio, where one was found
    """

    scheme: str
    m: int
    n: int
    k: int
    goal: float | None = None
    stretch: float | None = None
    share: float | None = None
    anchor: str = ""

    @property
    def name(self) -> str:
        return f"{self.scheme} m{self.m} {self.n}x{self.k}"


# The order is that of importance: time may end
GOALS = (
    Goal("int4", 1, 8192, 8192, 2.8, 3.2, 0.70, "2.25 (tinygemm), 2.24 (humming)"),
    Goal("int4-symmetric", 1, 8192, 8192, 2.8, 3.2, 0.70, "2.25 (tinygemm), 2.24 (humming)"),
    Goal("int4", 16, 8192, 8192, 2.5, 2.9, None, "2.2 (marlin)"),
    Goal("int4", 64, 8192, 8192, 1.9, 2.4, None, "1.48 (marlin)"),
    Goal("int4", 256, 8192, 8192, 0.9, 1.0, None, "0.63 (marlin)"),
    Goal("int4-symmetric", 16, 8192, 8192, 2.5, 2.9, None, "2.2 (marlin)"),
    Goal("int4-symmetric", 64, 8192, 8192, 1.9, 2.4, None, "1.48 (marlin)"),
    Goal("int4-symmetric", 256, 8192, 8192, 0.9, 1.0, None, "0.63 (marlin)"),
    Goal("int8", 1, 8192, 8192, 1.75, 1.85, 0.85, "1.60 (marlin, humming)"),
    Goal("int8", 16, 8192, 8192, 1.75, 1.85, 0.85, "1.60 (marlin, humming)"),
    Goal("float8-dynamic", 8192, 8192, 8192, 1.6, 1.75, None, "1.5"),
    Goal("int4", 1, 4096, 4096, 2.4, 2.7, None, "2.3 (tinygemm)"),
    Goal("int4", 1, 14336, 4096, 2.8, 3.1, None, ""),
    Goal("int4", 1, 16384, 16384, 3.1, 3.4, None, "2.6 (marlin)"),
    Goal("float8-dynamic", 4096, 4096, 4096, 1.35, 1.5, None, "1.3"),
    Goal("int8-dynamic", 8192, 8192, 8192, 1.5, None, None, ""),
    Goal("int8-dynamic", 4096, 4096, 4096, 1.35, None, None, ""),
    Goal("int4", 1024, 8192, 8192, 0.8, 1.0, None, "0.65 (marlin)"),
    Goal("int4", 4096, 8192, 8192, 0.9, 1.0, None, "0.6"),
    Goal("int2", 1, 8192, 8192, 4.0, 5.0, None, "2.58 (humming)"),
    Goal("int1", 1, 8192, 8192, 4.0, 5.0, None, "2.59 (humming)"),
    Goal("w4a8", 16, 8192, 8192, 2.6, None, None, ""),
    Goal("w4a8", 4096, 8192, 8192, 1.3, 1.6, None, ""),
    Goal("float8", 1, 8192, 8192),
    Goal("nf4", 1, 8192, 8192),
    Goal("int8", 64, 8192, 8192),
    Goal("float8-dynamic", 1, 8192, 8192),
    Goal("float8-dynamic", 16, 8192, 8192),
    Goal("float8-dynamic", 64, 8192, 8192),
    Goal("int8-dynamic", 16, 8192, 8192),
)
# Of plan section 6, with no kernel yet: named in the report, so that they are not forgotten
UNMEASURED = ("one token against an int8 cache", "Adam8bit step", "2:4 sparsity")
# (model's scheme, batch) -> (goal, stretch), of decoding eight layers of Llama-3-8B's shape in CUDA graphs
MODEL_GOALS = {("int4", 1): (2.3, 2.7)}
