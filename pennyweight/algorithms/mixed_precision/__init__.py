"""Mixed precision: assigns a bit width to each layer under a size or latency budget."""
