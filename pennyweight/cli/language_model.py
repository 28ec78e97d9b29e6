"""What ``chat`` and ``generate`` share: the model of a folder, a GGUF file or a Hub id, ready to answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ..support.extras import install
from .output import collection_paused

if TYPE_CHECKING:
    from ..inference.conversation import Answer, Conversation


def open_conversation(
    source: str, *, max_new_tokens: int, temperature: float | None, top_p: float | None, seed: int | None,
    kv_bits: str, int8_cache: bool, dtype: str, fuse: bool, system: str = "", chat: bool = False,
) -> Conversation:  # fmt: skip
    """A conversation with the model of ``source``; says on stderr which model it is. chat: a template is required.

    Raises ValueError, CheckpointError; what can be known before the weights are read, before.
    """
    settings = sampling(max_new_tokens, temperature, top_p)
    try:
        with collection_paused():
            import transformers
            from transformers import PreTrainedModel  # noqa: F401  (transformers imports its parts when they are named)
    except ImportError:
        raise ValueError(f"transformers is required: {install('hf')}") from None
    import torch

    from ..core.spec import DTYPES
    from ..inference.conversation import Conversation
    from ..inference.kv_cache import QuantizedCache
    from ..integrations.transformers import load_pretrained, load_tokenizer
    from ..io import local_path
    from ..io.config_files import read_config
    from ..io.detect_format import model_folder
    from ..io.meta_model import model_class

    bits = cache_bits(kv_bits, int8_cache)
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    transformers.utils.logging.set_verbosity_error()  # its advice is for programs
    path = local_path(source)
    with model_folder(path) as files:  # once: for a GGUF file they are made
        config = read_config(files)
        if config is None:
            raise ValueError(f"{path} has no config.json, so the model cannot be built")
        found = model_class(config)
        if isinstance(found, str):
            raise ValueError(f"{path}: {found}")
        if not found.can_generate() or config.get("is_encoder_decoder"):
            raise ValueError(
                f"{path} is a {found.__name__}, which does not continue text; a language model is required"
            )
        tokenizer = load_tokenizer(path, config_folder=files)
        if chat and not has_template(tokenizer):
            raise ValueError(
                f"the tokenizer of {source} has no chat template; use pennyweight generate, which needs none"
            )
        with _status(f"loading {source}"):
            model = load_pretrained(found, path, dtype=DTYPES[dtype] if dtype else None, config_folder=files)
    typer.echo(_description(model) + (_fused(model) if fuse else ""), err=True)
    if seed is not None:
        torch.manual_seed(seed)
    cache = (lambda: QuantizedCache(model.config, key_bits=bits[0], value_bits=bits[1])) if bits else None
    return Conversation(model, tokenizer, system=system, make_cache=cache, **settings)


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def cache_bits(text: str, int8_cache: bool) -> tuple[int, int] | None:
    """Bits of keys and of values for ``--kv-bits`` and ``--int8-cache``; None: float. Raises ValueError."""
    from ..inference.kv_cache import BITS

    if int8_cache and text not in ("", "8"):
        raise ValueError(f"--int8-cache is --kv-bits 8; pass one of them, not also --kv-bits {text}")
    if not (text := "8" if int8_cache else text):
        return None
    found = [int(n) if n.isdecimal() else -1 for n in text.replace(" ", "").split(",")]
    if len(found) > 2 or any(n not in BITS for n in found):
        raise ValueError(
            f"--kv-bits must be a number from {BITS[0]} to {BITS[-1]}, or two, of keys and of values, such as 8,4; "
            f"got {text!r}"
        )
    return found[0], found[-1]


def sampling(max_new_tokens: int, temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Arguments of ``generate``. Raises ValueError."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or positive, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}")
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature == 0:
        if top_p is not None:
            raise ValueError("--top-p has no effect with --temperature 0; pass one of them")
        settings |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif temperature is not None:
        settings |= {"do_sample": True, "temperature": temperature}
    if top_p is not None:
        settings |= {"do_sample": True, "top_p": top_p}
    return settings


def _description(model: Any) -> str:
    """One line: class, parameters, bytes."""
    from ..planning.quantize_report import size

    weights = {id(p): p for p in model.parameters()}.values()
    numel, nbytes = sum(p.numel() for p in weights), sum(p.nbytes for p in weights)
    bits = 8 * nbytes / numel
    return f"{type(model).__name__}, {numel / 1e6:,.0f} M parameters in {size(nbytes)}, {bits:.2f} bits each"


def _fused(model: Any) -> str:
    """Fuse the model; how many blocks are fused, or why none is."""
    from ..core.tensor import AffineQuantizedTensor
    from ..inference.fuse import FusedBlock, fuse_

    if not any(isinstance(p, AffineQuantizedTensor) for p in model.parameters()):
        return ", not quantized"
    with _status("fusing blocks"):
        report = fuse_(model)
    fused = sum(isinstance(m, FusedBlock) for m in model.modules())
    why = [*report.notes, *(f"{row.name}: {row.note}" for row in report.rows if row.note)][:1]
    return f", {fused} blocks fused" if fused else ", ".join(["", "no block fused", *why])


def write_part(part: str) -> None:
    """Write a part of an answer at once."""
    typer.echo(part, nl=False)
    sys.stdout.flush()


@contextmanager
def _status(what: str) -> Iterator[None]:
    """Says on stderr what takes time, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def speed(answer: Answer) -> str:
    """One line: tokens, tokens per second, time to the first token."""
    rate = answer.tokens_per_second
    return (
        f"{answer.tokens} tokens{'' if rate is None else f', {rate:.1f} per second'}, the first after "
        f"{answer.first_token:.2f} s (prompt of {answer.prompt_tokens}, {answer.reused} of them in the cache)"
    )
