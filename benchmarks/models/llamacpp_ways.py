"""The language models through llama.cpp: the random one as a GGUF of bf16, quantized by llama.cpp, every matrix at the
named type; SmolLM2 from its own file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
import torch
from torch import Tensor

from . import llama, transformers_llama
from .base import Case, Loaded, Way
from .llama import GGUF
from .transformers_llama import FileToFile, FirstToken

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}  # enum llama_ftype
Q8_0 = 8  # enum ggml_type
FLASH = 1  # enum llama_flash_attn_type: enabled, without which values cannot be quantized
NAMES = {  # of a block, in transformers and in GGUF
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def versions() -> dict[str, str]:
    return {"llama-cpp-python": lib.__version__}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in ENDS:
        return f"{ENDS[stem]}.weight"
    _, _, block, rest = stem.split(".", 3)
    return f"blk.{block}.{NAMES[rest]}.weight"


def _interleaved(w: Tensor, heads: int) -> Tensor:
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
    w.add_context_length(llama.POSITIONS)
    w.add_embedding_length(llama.HIDDEN)
    w.add_block_count(llama.LAYERS)
    w.add_feed_forward_length(llama.FFN)
    w.add_head_count(llama.HEADS)
    w.add_head_count_kv(llama.KV_HEADS)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(llama.HIDDEN // llama.HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(llama.VOCAB)
    w.add_tokenizer_model("none")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                t = tensors.get_tensor(name)
                if t.ndim == 1:
                    w.add_tensor(_gguf_name(name), t.float().numpy())
                    continue
                for part, heads in (("q_proj", llama.HEADS), ("k_proj", llama.KV_HEADS)):
                    t = _interleaved(t, heads) if part in name else t
                data = t.contiguous().view(torch.uint8).numpy()
                w.add_tensor(_gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _open(path: Path) -> Any:
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path.name}")
    return model


class Sequences:
    """Sequences of equal length in one context; `owned`: the model ends with it."""

    def __init__(self, model: Any, threads: int, sequences: int, most: int, cache: str, owned: bool = False) -> None:
        self.model, self.owned, self.past = model, owned, 0
        params = lib.llama_context_default_params()
        params.n_ctx = -(-most // 256) * 256 * sequences
        params.n_batch, params.n_ubatch, params.n_seq_max = most * sequences, 512, sequences
        params.n_threads = params.n_threads_batch = threads
        if cache == "int8":
            params.type_k = params.type_v = Q8_0
            params.flash_attn_type = FLASH
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.batch = lib.llama_batch_init(most * sequences, 0, 1)

    def prompt(self, numbers: list[list[int]]) -> Tensor:
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        self.past = 0
        return self._run(numbers)

    def token(self, numbers: list[int]) -> Tensor:
        return self._run([[n] for n in numbers])

    def _run(self, numbers: list[list[int]]) -> Tensor:
        batch, at, last = self.batch, 0, []
        for s, sequence in enumerate(numbers):
            for i, number in enumerate(sequence):
                batch.token[at], batch.pos[at] = number, self.past + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, s
                batch.logits[at] = i == len(sequence) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.past += len(numbers[0])
        size = (lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)),)
        rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), size) for i in last]
        return torch.from_numpy(np.stack(rows))

    def close(self) -> None:
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)
        if self.owned:
            lib.llama_model_free(self.model)

    def __del__(self) -> None:
        if getattr(self, "context", None) and not self.owned:
            self.close()


def _quantize(source: Path, out: Path, kind: str, threads: int) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = FILE_TYPES[kind], threads, True
    params.allow_requantize = True  # of a file that is not float
    if lib.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError("llama_model_quantize failed")


def _load(kind: str) -> Callable[[Path, int], Loaded]:
    def load(folder: Path, threads: int) -> Loaded:
        source, out = write_gguf(folder), folder / f"{kind}.gguf"
        _quantize(source, out, kind, threads)
        model = _open(out)

        def first(path: Path = out) -> Sequences:
            return Sequences(_open(path), threads, 1, 512, "plain", owned=True)

        def bind(case: Case) -> Any:
            if case.task == "first token":
                return FirstToken(first)
            if case.task == "file to file":
                again = folder / f"again-{kind}.gguf"  # the other file is mapped
                return FileToFile(
                    partial(_quantize, source, again, kind, threads), [source], again, partial(first, again)
                )
            sequences = Sequences(model, threads, case.batch, case.tokens + 512, case.cache)
            return transformers_llama.bind(sequences, case)

        return Loaded(bind, out.stat().st_size)

    return load


def _file(folder: Path, threads: int) -> Loaded:
    """The file as it is."""
    return _opened(folder / GGUF, threads)


def _requantized(folder: Path, threads: int) -> Loaded:
    """All matrices of the file at Q8_0, which llama.cpp's own quantizer makes of them."""
    out = folder / "Q8_0.gguf"
    _quantize(folder / GGUF, out, "Q8_0", threads)
    return _opened(out, threads)


def _opened(path: Path, threads: int) -> Loaded:
    model = _open(path)

    def bind(case: Case) -> Any:
        if case.task == "first token":
            return FirstToken(lambda: Sequences(_open(path), threads, 1, 512, "plain", owned=True))
        if case.task == "generate":
            return transformers_llama.bind(Generator(model, path, threads, case), case)
        return transformers_llama.bind(Sequences(model, threads, case.batch, case.tokens + 512, case.cache), case)

    return Loaded(bind, path.stat().st_size)


class Generator(Sequences):
    """Also with the tokens that llama-cpp-python's own loop generates."""

    def __init__(self, model: Any, path: Path, threads: int, case: Case) -> None:
        super().__init__(model, threads, 1, case.tokens + 512, case.cache)
        self.user = lib.Llama(
            str(path), n_ctx=case.tokens + 512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, numbers: list[int], count: int) -> list[int]:
        self.user.reset()
        return list(islice(self.user.generate(numbers, temp=0.0, reset=True), count))


def ways() -> list[Way]:
    return [
        Way("llama.cpp Q4_0", "llamacpp", 4, 4.5, "int8", 0.6, ("llama",), _load("Q4_0")),
        Way("llama.cpp Q8_0", "llamacpp", 8, 8.5, "int8", 0.12, ("llama",), _load("Q8_0")),
        Way("llama.cpp Q4_1 file", "llamacpp", 4, llama.FILE_BITS, "int8", 0.2, ("smollm2",), _file),
        Way("llama.cpp Q8_0", "llamacpp", 8, 8.5, "int8", 0.2, ("smollm2",), _requantized),
    ]
