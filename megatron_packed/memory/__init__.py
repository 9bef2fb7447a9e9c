"""Recomputation of activations in the backward pass, and their offload to host memory."""
