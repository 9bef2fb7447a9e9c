"""Supported Hugging Face families, one module for each kin of families.

``family.py`` describes what a family consists of. ``registry.py`` lists all families.
"""
