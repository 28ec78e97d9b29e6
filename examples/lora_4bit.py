"""Train LoRA adapters with PEFT on a model with 4-bit weights, and merge them with a report of what the merge loses.

The base model is trained here first, byte by byte, on Python sources; the adapters then learn the English of `help()`.

    pip install ".[hf]" peft
    python examples/lora_4bit.py
"""

import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw
from pennyweight.integrations.peft import merge_and_report

ENGLISH = "\n".join(pydoc_data.topics.topics.values()).encode()
SOURCES = b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def batches(text: bytes, count: int, seed: int) -> list[Tensor]:
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 64, (count, 16, 1), generator=torch.Generator().manual_seed(seed))
    return list(data[starts + torch.arange(64)])


def train(model: nn.Module, data: list[Tensor], lr: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    for ids in data:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss(model: nn.Module) -> float:
    return sum(model(input_ids=ids, labels=ids).loss.item() for ids in batches(ENGLISH, 8, seed=2)) / 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 256, "initializer_range": 0.08, **sizes}))
    train(base, batches(SOURCES, 150, seed=0), lr=5e-3)
    report = pw.quantize_(base, pw.NF4WeightOnlyConfig(), skip=["lm_head"])
    print(f"base: {report.summary()}; loss on English {loss(base):.3f}")
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    train(model, batches(ENGLISH, 100, seed=1), lr=5e-3)
    print(f"after training adapters of {size:,} numbers: loss {loss(model):.3f}")
    merged, report = merge_and_report(model, config=pw.Int8WeightOnlyConfig())  # rounding to NF4 again would lose more
    print(f"{report}\nmerged into int8: loss {loss(merged):.3f}")


if __name__ == "__main__":
    main()
