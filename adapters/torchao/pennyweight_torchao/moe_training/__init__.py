"""torchao.prototype.moe_training: expert and linear layers with low-precision products, over our training."""
