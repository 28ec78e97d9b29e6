"""torchao.prototype.quantized_training: configs, and weights whose products are quantized, over our training."""
