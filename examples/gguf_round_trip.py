"""Write a Hugging Face model as a GGUF file, Q4_K_M as llama.cpp mixes it, load it back, and compare the two engines.

The model is a small Llama that learns this sentence by heart. llama.cpp runs after `pip install llama-cpp-python`.

    python examples/gguf_round_trip.py OUT_DIR
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pennyweight as pw

TEXT = "A GGUF file holds the weights, the tokenizer and the settings of a model, so llama.cpp needs nothing else."


def tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.train_from_iterator([TEXT], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def trained_model(ids: torch.Tensor, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": vocabulary, "eos_token_id": None, **size}))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(40):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main(out: str) -> None:
    folder, file, tokens = Path(out, "float"), Path(out, "model.gguf"), tokenizer()
    ids = tokens(TEXT, return_tensors="pt").input_ids
    tokens.save_pretrained(folder)
    trained_model(ids, len(tokens)).save_pretrained(folder)
    print(pw.convert(folder, file, to="gguf", gguf_type="Q4_K_M"))
    model: Any = pw.load(file, LlamaForCausalLM.from_pretrained(folder))  # stays quantized
    ours = model.generate(ids[:, :4], max_new_tokens=24, do_sample=False)[0, 4:].tolist()
    print(f"Pennyweight: {tokens.decode(ours)!r}")
    try:
        from llama_cpp import Llama
    except ImportError:
        return print("llama.cpp: not compared, llama-cpp-python is not installed")
    stream = Llama(str(file), n_ctx=64, verbose=False).generate(ids[0, :4].tolist(), temp=0.0)
    theirs = [token for _, token in zip(range(24), stream, strict=False)]
    print(f"llama.cpp:   {tokens.decode(theirs)!r}\n{sum(map(int.__eq__, ours, theirs))} of 24 tokens equal")


if __name__ == "__main__":
    main(sys.argv[1])
