"""torchao, eager, on the language model: short contexts only, some of its ways take seconds for a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import transformers_llama
from .base import Case, Loaded, Way
from .transformers_llama import Sequences


def versions() -> dict[str, str]:
    import torchao

    return {"torchao": torchao.__version__}


def _load(make: Callable[[], Any]) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        from torchao.quantization import quantize_

        model = transformers_llama.load(folder)
        quantize_(model, make())
        return Loaded(lambda case: transformers_llama.bind(Sequences(model), case))

    return load


def _short(case: Case) -> bool | str:
    short = case.task in ("prompt", "decode") and case.tokens <= 128 and case.batch == 1
    return short or "measured at one short sequence only"


def _int4() -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(128)


def _int8(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization as ao

        return getattr(ao, name)(set_inductor_config=False)

    return make


def ways() -> list[Way]:
    rows = (
        ("int4 g128 (prototype)", 4, 4.25, "bf16", 0.6, _int4),
        ("int8-dynamic", 8, 8, "int8", 0.12, _int8("Int8DynamicActivationInt8WeightConfig")),
        ("int8 weight-only", 8, 8, "bf16", 0.12, _int8("Int8WeightOnlyConfig")),
    )
    return [Way(f"torchao {name}", "torchao", *rest, ("llama",), _load(make), _short) for name, *rest, make in rows]
