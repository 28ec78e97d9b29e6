"""Graph mode: quantization of exported graphs by annotations, as ``quantize`` and ``dequantize`` operators."""
