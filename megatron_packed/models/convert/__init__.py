"""Conversion of Hugging Face weights to a checkpoint, and back.

``families`` lists the supported model families and the names of their tensors.
"""
