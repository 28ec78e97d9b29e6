"""The rows of the table: which models do what."""

from __future__ import annotations

from .base import Case


def _encoder(batch: int, tokens: int) -> Case:
    return Case(f"MiniLM {batch}x{tokens}", "minilm", "forward", batch, tokens)


def _images(title: str, name: str) -> list[Case]:
    return [Case(f"{title}, {n} image{'s' * (n > 1)}", name, "forward", n) for n in (1, 16)]


def _llama(name: str, task: str, tokens: int, batch: int = 1, cache: str = "plain") -> Case:
    return Case(f"Llama 0.85B, {name}", "llama", task, batch, tokens, cache)


def _smollm2(name: str, task: str, tokens: int, batch: int = 1) -> Case:
    return Case(f"SmolLM2-135M, {name}", "smollm2", task, batch, tokens)


CASES = [
    _encoder(1, 16),
    _encoder(1, 128),
    _encoder(16, 64),
    _encoder(32, 128),
    *_images("ResNet-18", "resnet18"),
    *_images("ResNet-50", "resnet50"),
    *_images("MobileNetV2", "mobilenet_v2"),
    Case("ViT-B/16", "vit"),
    Case("Whisper-tiny encoder", "whisper"),
    _smollm2("prompt of 128", "prompt", 128),
    _smollm2("prompt of 512", "prompt", 512),
    _smollm2("decode at 128", "decode", 128),
    _smollm2("decode at 128, 8 sequences", "decode", 128, batch=8),
    _smollm2("generate 32 tokens", "generate", 128),
    _smollm2("load and first token", "first token", 1),
    _llama("prompt of 128", "prompt", 128),
    _llama("prompt of 2048", "prompt", 2048),
    _llama("decode at 128", "decode", 128),
    _llama("decode at 128, 8 sequences", "decode", 128, batch=8),
    _llama("decode at 4096", "decode", 4096),
    _llama("decode at 4096, int8 cache", "decode", 4096, cache="int8"),
    _llama("load and first token", "first token", 1),
    Case("Llama 0.85B, file to file", "llama", "file to file"),
]
MODELS = list(dict.fromkeys(c.model for c in CASES))
LANGUAGE = ("llama", "smollm2")
TRAINED = ("minilm", "smollm2")  # the others have random weights
TRANSFORMERS = ("minilm", "vit", "whisper")
CONVOLUTIONAL = ("resnet18", "resnet50", "mobilenet_v2")


def chosen(models: list[str]) -> list[Case]:
    """Cases of some models, or of one by its own name."""
    return [c for c in CASES if c.model in models]
