"""How much a model loses for how many bits: ours beside what a user would take instead."""
