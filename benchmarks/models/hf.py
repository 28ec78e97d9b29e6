"""Through transformers, eager: bf16, pennyweight and torchao."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import base
from .base import Loaded, Way


def write_model(folder: Path) -> None:
    """The model with random weights, bf16, as a Hugging Face folder."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=base.HIDDEN, num_hidden_layers=base.LAYERS, intermediate_size=base.FFN,
        num_attention_heads=base.HEADS, num_key_value_heads=base.KV_HEADS, vocab_size=base.VOCAB,
        max_position_embeddings=2048, rope_theta=10000.0, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.fill_(1)
        else:  # embeddings that outweigh what blocks add: otherwise random blocks amplify errors without measure
            p.data.normal_(0, 1 if "embed" in name else 0.02)
    model.save_pretrained(folder)


class Eager:
    """A transformers model with its cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model.eval(), None

    def prompt(self, numbers: list[int]) -> torch.Tensor:
        self.cache = None
        return self._run(numbers)

    def step(self, number: int) -> torch.Tensor:
        return self._run([number])

    @torch.inference_mode(False)
    def _run(self, numbers: list[int]) -> torch.Tensor:
        with torch.no_grad():
            out = self.model(torch.tensor([numbers]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[0, -1]


def _load(folder: Path) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def bf16(folder: Path, threads: int) -> Loaded:
    model = _load(folder)
    return Loaded(Eager(model), sum(p.nbytes for p in model.parameters()))


def bf16_grouped(folder: Path, threads: int) -> Loaded:
    """What grouped attention alone is worth."""
    from pennyweight.integrations.attention import use_grouped_attention

    loaded = bf16(folder, threads)
    use_grouped_attention(loaded.model.model)
    return loaded


def pennyweight(make: Callable[[Any], Any]) -> Callable[[Path, int], Loaded]:
    """make: the package -> a config."""

    def load(folder: Path, threads: int) -> Loaded:
        import pennyweight as pw
        from pennyweight.integrations.attention import use_grouped_attention

        begin = time.perf_counter()
        model = _load(folder)
        loaded = time.perf_counter()
        pw.quantize_(model, make(pw))
        quantized = time.perf_counter()
        out = folder / "pennyweight"
        pw.save(model, out)
        saved = time.perf_counter()
        nbytes = sum(f.stat().st_size for f in out.iterdir())
        shutil.rmtree(out)
        costs = {"quantize": quantized - loaded, "disk to disk": saved - begin}
        costs |= base.read_and_write(list(folder.glob("*.safetensors")), nbytes, folder / "scratch")
        pw.freeze_(model)
        use_grouped_attention(model)
        return Loaded(Eager(model), nbytes, costs)

    return load


def torchao(make: Callable[[], Any]) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        from torchao.quantization import quantize_

        model = _load(folder)
        begin = time.perf_counter()
        quantize_(model, make())
        return Loaded(Eager(model), 0, {"quantize": time.perf_counter() - begin})

    return load


def torch_ways() -> list[Way]:
    return [Way("bf16 eager", "torch", 16, 16, "bf16", 0.01, bf16)]


def pennyweight_ways() -> list[Way]:

    def mixed(pw: Any, **more: Any) -> Any:
        return pw.Int8DynamicActivationIntxWeightConfig(torch.int4, pw.PerGroup(32), **more)

    rows = (
        ("int4 g32", 4, 5, "bf16", 0.6, lambda pw: pw.Int4WeightOnlyConfig(group_size=32)),
        ("int4 g128", 4, 4.25, "bf16", 0.6, lambda pw: pw.Int4WeightOnlyConfig(group_size=128)),
        ("int8-dynamic-int4 g32", 4, 4.5, "int8", 0.6, mixed),
        ("int8-symmetric-int4 g32", 4, 4.5, "int8", 0.6,
         lambda pw: mixed(pw, act_mapping_type=pw.MappingType.SYMMETRIC)),
        ("int8-dynamic", 8, 8, "int8", 0.12, lambda pw: pw.Int8DynamicActivationInt8WeightConfig()),
        ("int8 weight-only", 8, 8, "bf16", 0.12, lambda pw: pw.Int8WeightOnlyConfig()),
    )  # fmt: skip
    ways = [Way(f"pennyweight {name}", "pennyweight", *rest, pennyweight(make)) for name, *rest, make in rows]
    return [Way("bf16 eager, grouped attention", "pennyweight", 16, 16, "bf16", 0.03, bf16_grouped), *ways]


def torchao_ways() -> list[Way]:
    def int4() -> Any:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(128)

    def int8(name: str) -> Callable[[], Any]:
        def make() -> Any:
            import torchao.quantization as ao

            return getattr(ao, name)(set_inductor_config=False)

        return make

    rows = (
        ("int4 g128 (prototype)", 4, 4.25, "bf16", 0.6, int4),
        ("int8-dynamic", 8, 8, "int8", 0.12, int8("Int8DynamicActivationInt8WeightConfig")),
        ("int8 weight-only", 8, 8, "bf16", 0.12, int8("Int8WeightOnlyConfig")),
    )
    return [Way(f"torchao {name}, eager", "torchao", *rest, torchao(make)) for name, *rest, make in rows]
