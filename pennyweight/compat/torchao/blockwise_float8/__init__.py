"""torchao's float8 with scales per block of 128, over our formats and training recipes."""
