"""Weights from and to checkpoints of Megatron (``torch_dist``); nothing in a file is run."""
