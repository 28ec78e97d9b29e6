"""Calibration: runs data through the model block by block and collects statistics of the layer inputs."""
