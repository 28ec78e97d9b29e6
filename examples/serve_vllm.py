"""Write an int8 folder that vLLM reads, check it here, and print the command that serves it (with --run: start it).

Without MODEL_DIR the model is a small random Llama. With your own, a folder or Hub id, the command line is enough:
`pennyweight quantize MODEL_DIR small --config w8a8 --for vllm; pennyweight convert small OUT_DIR --for vllm`.

    pip install ".[hf]"        # and vllm, on the machine that serves
    python examples/serve_vllm.py OUT_DIR [--model MODEL_DIR] [--run]
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pennyweight as pw


def random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 512, **size})).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--run", action="store_true", help="start the server")
    options = parser.parse_args()
    source = options.model or random_model(options.out / "float")
    small, served = options.out / "small", options.out / "served"

    print(pw.quantize_checkpoint(source, small, "w8a8", skip=["lm_head"], for_="vllm"))  # or an error
    pw.convert(small, served, for_="vllm")  # compressed-tensors: the same codes, in the layout of vLLM's own kernels

    with pw.open(served) as checkpoint:
        print(f"{served}: {checkpoint.format}, {len(checkpoint.quantized)} quantized weights")
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (source, small)]
    models.append(pw.load(served, AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)))
    with torch.inference_mode():
        exact, quantized, read = (model(torch.arange(64)[None]).logits for model in models)
    print(f"relative error of int8: {(quantized - exact).norm() / exact.norm():.4f}")
    print(f"difference of the files for vLLM to the quantized folder: {(read - quantized).abs().max():.1e}")

    print(f"\nvllm serve {served}")
    if options.run and find_spec("vllm") is None:
        print("vLLM is not installed here: run this command where it is")
    elif options.run:
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served)]
        subprocess.run([*server, *([] if options.model else ["--skip-tokenizer-init"])], check=True)


if __name__ == "__main__":
    main()
