"""Kinds of layers with torch: one file each, with the record ``MIXER``.

A kind is complete with its file here and the file of its options in ``config/kinds``. `registry.py`
finds every module of this folder that has a ``MIXER``.
"""
