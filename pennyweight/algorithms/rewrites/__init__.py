"""Rewrites: each changes the weights of a model, and leaves the function that the float model computes as it is."""
