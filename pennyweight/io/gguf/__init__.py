"""GGUF, the format of llama.cpp: container, block types, architecture names and configs, tokenizers."""
