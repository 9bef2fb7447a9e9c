"""Capture modules on packed micro-batches in CUDA graphs, and replay them over every pack that
fits.
"""
