"""Small transformers models with random weights, their folders, and what they say."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pennyweight as pw

IDS = torch.arange(18).view(2, 9) * 7 % 200 + 3


def shape(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, **changes,
        }
    )  # fmt: skip


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(shape(**changes)).eval()


def float_folder(folder: Path, **changes: Any) -> Path:
    llama(**changes).save_pretrained(folder)
    return folder


def tokens(model: Any, **kwargs: Any) -> list[list[int]]:
    kwargs = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **kwargs}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **kwargs).tolist()


def quantized(model: nn.Module) -> dict[str, pw.AffineQuantizedTensor]:
    found = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in found if isinstance(p, pw.AffineQuantizedTensor)}


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit: parts, specs, layouts and dtypes of what is quantized, values of the rest."""
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        y = theirs[name]
        assert type(x) is type(y), name
        assert x.dtype == y.dtype, name
        if isinstance(x, pw.AffineQuantizedTensor):
            assert (x.spec, x.act, x.axes) == (y.spec, y.act, y.axes), name
            pairs = zip(flat(x.plain_parts()), flat(y.plain_parts()), strict=True)
        else:
            pairs = iter([(x, y)])
        assert all(p.dtype == q.dtype and torch.equal(bits(p), bits(q)) for p, q in pairs), name


def flat(parts: Any) -> list[Tensor]:
    return [t for p in parts if p is not None for t in (flat(p) if isinstance(p, tuple) else [p])]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes with a chat template, 259 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks, letters = ["<pad>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(vocab_size=259, special_tokens=marks, initial_alphabet=letters))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)
