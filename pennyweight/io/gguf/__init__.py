"""GGUF, the format of llama.cpp: container, block types, names and configs of architectures, tokenizers."""
