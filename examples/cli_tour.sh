#!/usr/bin/env bash
# The command line on one model: quantize, inspect, eval, convert, report.
#
#     pip install ".[hf,report]"
#     examples/cli_tour.sh OUT_DIR [MODEL_DIR]        # without MODEL_DIR: a small Llama with random weights
set -euo pipefail
out=$1
model=${2:-$out/float}
text=$(python -c 'import pydoc; print(pydoc.__file__)') # any text of the kind that the model reads

if [[ $# -lt 2 ]]; then
    python - "$model" <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokens.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(sys.argv[1])
config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON
fi

run() { # prints a command before it runs
    printf '\n$ %s\n' "$*"
    "$@"
}

run pennyweight quantize "$model" "$out/small" --config int4 --group-size 64 --embeddings int8
run pennyweight inspect "$out/small"
run pennyweight eval "$model" "$out/small" --text "$text"
run pennyweight convert "$out/small" "$out/model.gguf" --to gguf
run pennyweight report "$out/small" --float "$model" --text "$text" --out "$out/report.html"
