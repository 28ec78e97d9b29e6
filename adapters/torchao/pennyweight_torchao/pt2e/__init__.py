"""torchao's names for quantization of exported graphs; the arithmetic is in :mod:`pennyweight_torchao.graph_mode`."""
