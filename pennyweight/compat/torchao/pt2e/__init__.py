"""torchao's names for quantization of exported graphs; the arithmetic is in :mod:`pennyweight.graph_mode`."""
