"""Weights of Hugging Face's models as checkpoints, and back. `names.py` says which families and
how.
"""
