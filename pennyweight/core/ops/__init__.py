"""aten operators of the quantized tensor, one file per family."""
