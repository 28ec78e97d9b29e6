"""Mixed precision: which layer gets how many bits, under a budget of bytes or time."""
