"""Hybrid model, its initial values, its floating-point operations and its isolation self-test.

``estimate`` predicts memory and parameters of a configuration. ``convert`` imports and exports
weights of Hugging Face models.
"""
