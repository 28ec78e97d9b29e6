"""GGUF: the container of llama.cpp and ggml, and the block types that tensors have in it."""
