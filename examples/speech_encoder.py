"""Quantize a Whisper encoder to int8 and fuse its blocks: bytes, error and speed on one clip.

The weights are random, so that nothing is downloaded: the error says how close int8 is, not how well it transcribes.
With your own model: `WhisperForConditionalGeneration.from_pretrained(...).model.encoder`.

    pip install ".[hf]"
    python examples/speech_encoder.py
"""

import copy
import time

import torch
from torch import Tensor, nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import pennyweight as pw


def milliseconds(models: list[nn.Module], clip: Tensor) -> list[float]:
    """The least of five calls of each model, taken in turn, so that other load on the machine affects all alike."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(5):
        for model, took in zip(models, times, strict=True):
            start = time.perf_counter()
            model(clip)
            took.append(1e3 * (time.perf_counter() - start))
    return [min(took) for took in times]


def main() -> None:
    torch.manual_seed(0)
    size = {"d_model": 384, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}  # those of Whisper-tiny
    model = WhisperEncoder(WhisperConfig.from_dict({"encoder_layers": 4, "max_source_positions": 500, **size})).eval()
    clip = torch.randn(1, 80, 1000)  # [batch, mel bins, frames]: ten seconds

    small = copy.deepcopy(model)
    print(pw.quantize_(small, "int8-dynamic", measure=(500,)))  # times each shape of layer at 500 rows, beside float
    fused = copy.deepcopy(small)
    print(pw.fuse_(fused, clip).summary())  # each block becomes one native call

    with torch.inference_mode():
        exact, *others = (one(clip).last_hidden_state for one in (model, small, fused))
        before, plain, after = milliseconds([model, small, fused], clip)
    errors = [float((other - exact).norm() / exact.norm()) for other in others]
    print(f"float32:     {before:.1f} ms")
    print(f"int8:        {plain:.1f} ms ({before / plain:.2f}x as fast), relative error {errors[0]:.4f}")
    print(f"int8, fused: {after:.1f} ms ({before / after:.2f}x as fast), relative error {errors[1]:.4f}")


if __name__ == "__main__":
    main()
