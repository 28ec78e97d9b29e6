"""torchao.prototype.quantization: static float8, packed unsigned integers, embeddings, lookup tables."""
