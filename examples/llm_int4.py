"""Quantize a language model to int4: round-to-nearest, GPTQ, and a searched mixture of bits at the same size.

A small Llama is trained here first, byte by byte, on the sources of Python's standard library. With your own model,
replace `trained_model` by `AutoModelForCausalLM.from_pretrained(...)`, and `batches` by tokenized text.

    pip install ".[hf,search]"
    python examples/llm_int4.py OUT_DIR
"""

import copy
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw


def batches(count: int, seed: int) -> list[Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 64, (count, 16, 1), generator=torch.Generator().manual_seed(seed))
    return list(data[starts + torch.arange(64)])


def trained_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 256, "initializer_range": 0.08, **size}))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step, ids in enumerate(batches(240, seed=0), 1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 80 == 0:
            print(f"step {step} of 240: loss {loss.item():.2f}")
    return model.eval()


def main(out: str) -> None:
    model = trained_model()
    calibration, test = batches(16, seed=1), batches(8, seed=2)
    int4 = pw.Int4WeightOnlyConfig(group_size=128)  # 4.5 bits per weight, scales and offsets included
    mixture = pw.search(model, calibration, "4.5 bpw", skip=["lm_head"]).config
    for name, config, algorithm in [("nearest", int4, "nearest"), ("gptq", int4, "gptq"), ("mixture", mixture, "gptq")]:
        small = copy.deepcopy(model)
        report = pw.quantize_(small, config, skip=["lm_head"], calibration=calibration, algorithm=algorithm)
        print(report if name == "mixture" else report.summary())  # bits, error and kernel of each layer
        kl = pw.compare(model, small, test, layers=False).kl
        print(f"{name}: KL to the float model {kl.mean if kl else 0:.5f} nats per byte\n")
        small.save_pretrained(Path(out, name))  # `import pennyweight`, then from_pretrained reads it


if __name__ == "__main__":
    main(sys.argv[1])
