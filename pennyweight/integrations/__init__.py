"""What other libraries need to run on quantized models, one file a concern."""
