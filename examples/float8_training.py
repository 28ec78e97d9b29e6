"""Train with float8 matrix products, from the same start and data as in float32 and bfloat16, and compare the losses.

A small Llama learns the sources of the standard library byte by byte. Weights, gradients and optimizer stay in high
precision; the three products of each linear layer round their inputs.

    pip install ".[hf]"
    python examples/float8_training.py
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw
from pennyweight.training import Float8TrainingConfig


def batches(count: int) -> list[Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 64, (count, 16, 1), generator=torch.Generator().manual_seed(0))
    return list(data[starts + torch.arange(64)])


def model_to_train() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 256, "initializer_range": 0.08, **size}))


def train(model: LlamaForCausalLM, data: list[Tensor], dtype: torch.dtype) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses: list[float] = []
    for ids in data:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20  # nats per byte


def main() -> None:
    data = batches(100)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        print(f"{name}: loss {train(model_to_train(), data, dtype):.3f}")
    model = model_to_train()
    print(
        pw.quantize_(model, Float8TrainingConfig("rowwise"), skip=["lm_head"])
    )  # names the layers that are left alone
    print(f"float8: loss {train(model, data, torch.bfloat16):.3f}")


if __name__ == "__main__":
    main()
