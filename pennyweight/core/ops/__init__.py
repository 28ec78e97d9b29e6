"""What aten asks of the quantized tensor: one file for each family of operators."""
