"""The stages of ``scripts/gpu``: what a device is asked in the few minutes that one is at hand."""
