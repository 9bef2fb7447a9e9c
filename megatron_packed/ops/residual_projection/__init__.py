"""Projection whose result is added to the residual stream, ``residual + x W^T``."""
