"""Ops on plain tensors: one folder each, with a reference in PyTorch and faster backends.

``backend_dispatch.py`` chooses the backend of an op and reports why other backends were not chosen.
"""
