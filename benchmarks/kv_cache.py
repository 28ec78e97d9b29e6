"""What a quantized KV cache costs in accuracy: SmolLM2-135M-Instruct beside the same model with a float cache.

    python benchmarks/kv_cache.py [--windows 16] [--residual 128] [--ways "4 bits,8 and 4 bits"] [--fused] [--json OUT]

Windows of 1024 tokens of held-out text (benchmarks/accuracy/smollm2.py: language reference, READMEs, licences). The
first 512 tokens are the prompt, and the others follow in calls of 32, so that each token is predicted from a past of
which all but the newest tokens are quantized. Figures are of these 512 tokens: the Kullback-Leibler divergence of the
next token's distribution from that with a float cache, in nats, its mean over tokens and the standard error of the
windows' means; and how often the most likely token is the same.

The model is what the Q4_1 file decodes to, in float32, so scales and offsets are float32 here. Bits are those of a
bfloat16 model: of a number that is quantized, scale and offset included, keys and values together.

--fused   the model stays quantized as in the file, in bfloat16, and its blocks are fused, so that native attention
          reads the codes; the model with the float cache, too
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine
from benchmarks.accuracy import smollm2

LENGTH, PROMPT, STEP = 1024, 512, 32
PLAIN = {"rotate": False, "sinks": 0}
WAYS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "4 bits, neither": {"bits": 4, **PLAIN},
    "4 bits, rotated": {"bits": 4, "rotate": True, "sinks": 0},
    "4 bits, first 4 tokens float": {"bits": 4, "rotate": False, "sinks": 4},
    "4 bits": {"bits": 4},
    "4 bits, groups of 64": {"bits": 4, "group": 64},
    "8 and 4 bits, neither": {"key_bits": 8, "value_bits": 4, **PLAIN},
    "8 and 4 bits": {"key_bits": 8, "value_bits": 4},
    "4 and 8 bits": {"key_bits": 4, "value_bits": 8},
    "6 and 4 bits": {"key_bits": 6, "value_bits": 4},
    "3 bits, neither": {"bits": 3, **PLAIN},
    "3 bits": {"bits": 3},
    "2 bits, neither": {"bits": 2, **PLAIN},
    "2 bits": {"bits": 2},
}


def read_prompt(model: Any, ids: Tensor) -> Any:
    """A float cache. Keys and values of a first call are the same whatever the cache does with them later."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    return cache


def log_probabilities(model: Any, ids: Tensor, cache: Any, prompt: Any) -> Tensor:
    """float32 [tokens after the prompt, vocabulary]."""
    found = []
    with torch.inference_mode():
        for i, layer in enumerate(prompt.layers):
            cache.update(layer.keys.clone(), layer.values.clone(), i)
        for i in range(PROMPT, LENGTH, STEP):
            found.append(model(ids[:, i : i + STEP], past_key_values=cache).logits[0].float())
    return torch.cat(found).log_softmax(-1)


def bits_per_number(group: int, key_bits: int, value_bits: int) -> float:
    return (key_bits + value_bits) / 2 + 32 / group


def measure(model: Any, windows: Tensor, ways: list[str], residual: int) -> dict[str, dict[str, float]]:
    from transformers.cache_utils import DynamicCache

    from pennyweight.inference.kv_cache import QuantizedCache

    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    bits = {}
    for window in windows.split(1):
        prompt = read_prompt(model, window)
        exact = log_probabilities(model, window, DynamicCache(config=model.config), prompt)
        for way in ways:
            cache = QuantizedCache(model.config, residual=residual, **WAYS[way])
            got = log_probabilities(model, window, cache, prompt)
            kl = (exact.exp() * (exact - got)).sum(-1).mean().item()
            found[way].append((kl, (exact.argmax(-1) == got.argmax(-1)).double().mean().item()))
            bits[way] = bits_per_number(cache.group, cache.key_bits, cache.value_bits)
        print(f"{len(found[ways[0]])} of {len(windows)} windows", file=sys.stderr, flush=True)
    rows = {}
    for way, results in found.items():
        kl, same = torch.tensor(results, dtype=torch.float64).unbind(1)
        error = kl.std().item() / len(kl) ** 0.5 if len(kl) > 1 else float("nan")
        rows[way] = {"bits": bits[way], "kl": kl.mean().item(), "error": error, "same": same.mean().item()}
    return rows


def table(rows: dict[str, dict[str, float]], residual: int) -> str:
    lines = [f"| residual {residual} | bits | KL | same token |", "|---|---:|---:|---:|"]
    for way, row in rows.items():
        lines.append(
            f"| {way} | {row['bits']:.2f} | {row['kl']:.5f} ± {row['error']:.5f} | {100 * row['same']:.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--residual", type=int, default=128)
    parser.add_argument("--ways", default="", help=f"of: {', '.join(WAYS)}; separated by semicolons")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = [way.strip() for way in options.ways.split(";")] if options.ways else list(WAYS)
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    model = fused() if options.fused else smollm2.load()
    windows = smollm2.evaluation(smollm2.tokenizer(), options.windows, LENGTH)
    rows = measure(model, windows, ways, options.residual)
    print(table(rows, options.residual))
    if options.json:
        about = {"windows": options.windows, "residual": options.residual, "fused": options.fused}
        about |= {"machine": machine.describe(torch.get_num_threads())}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


def fused() -> Any:
    from transformers import LlamaForCausalLM

    import pennyweight as pw
    from pennyweight.integrations.transformers import load_pretrained

    model = load_pretrained(LlamaForCausalLM, smollm2.file(), dtype=torch.bfloat16).eval()
    pw.fuse_(model)
    return model


if __name__ == "__main__":
    main()
