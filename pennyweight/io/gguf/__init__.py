"""GGUF files of llama.cpp: container, blocks, names, configs and tokenizers."""
