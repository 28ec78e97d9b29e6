"""Through llama.cpp: the same weights as a GGUF of bf16, quantized by llama.cpp, every matrix at the named type."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import base
from .base import Loaded, Way

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}  # enum llama_ftype
NAMES = {  # of a block, in transformers and in GGUF
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in ENDS:
        return f"{ENDS[stem]}.weight"
    _, _, block, rest = stem.split(".", 3)
    return f"blk.{block}.{NAMES[rest]}.weight"


def _interleaved(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k in ggml's order of rotary pairs: neighbours, where transformers pairs the halves of a head."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(w.shape).contiguous()


def write_gguf(folder: Path) -> Path:
    """The model of a Hugging Face folder as bf16 GGUF, without a tokenizer."""
    import gguf
    from safetensors import safe_open

    path = folder / "bf16.gguf"
    if path.exists():
        return path
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(2048)
    w.add_embedding_length(base.HIDDEN)
    w.add_block_count(base.LAYERS)
    w.add_feed_forward_length(base.FFN)
    w.add_head_count(base.HEADS)
    w.add_head_count_kv(base.KV_HEADS)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(base.HIDDEN // base.HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(base.VOCAB)
    w.add_tokenizer_model("none")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                t = tensors.get_tensor(name)
                if t.ndim == 1:
                    w.add_tensor(_gguf_name(name), t.float().numpy())
                    continue
                for part, heads in (("q_proj", base.HEADS), ("k_proj", base.KV_HEADS)):
                    t = _interleaved(t, heads) if part in name else t
                data = t.contiguous().view(torch.uint8).numpy()
                w.add_tensor(_gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


class Llama:
    """A llama.cpp model with one sequence."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp as lib

        self.lib = lib
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path.name}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)

    def prompt(self, numbers: list[int]) -> torch.Tensor:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self._run(numbers)

    def step(self, number: int) -> torch.Tensor:
        return self._run([number])

    def _run(self, numbers: list[int]) -> torch.Tensor:
        held = (self.lib.llama_token * len(numbers))(*numbers)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(held, len(numbers))):
            raise RuntimeError("llama_decode failed")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (base.VOCAB,)).copy())


def quantized(kind: str) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        import llama_cpp as lib

        source, out = write_gguf(folder), folder / f"{kind}.gguf"
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread, params.pure = FILE_TYPES[kind], threads, True
        begin = time.perf_counter()
        if lib.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
            raise RuntimeError("llama_model_quantize failed")
        costs = {"disk to disk": time.perf_counter() - begin}
        nbytes = out.stat().st_size
        costs |= base.read_and_write([source], nbytes, folder / "scratch")
        return Loaded(Llama(out, threads), nbytes, costs)

    return load


def ways() -> list[Way]:
    return [
        Way("llama.cpp Q4_0", "llamacpp", 4, 4.5, "int8", 0.6, quantized("Q4_0")),
        Way("llama.cpp Q8_0", "llamacpp", 8, 8.5, "int8", 0.12, quantized("Q8_0")),
    ]
