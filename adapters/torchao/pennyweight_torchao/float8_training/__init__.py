"""torchao.float8: training with float8 products, over our recipes, and torchao's float8 training tensor."""
