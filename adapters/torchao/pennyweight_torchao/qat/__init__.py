"""torchao.quantization.qat: fake quantization configs, fake quantizers, layers, and the quantizers of two steps."""
