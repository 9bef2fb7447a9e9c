"""Commands of ``megatron-packed``, one module for each; ``main.py`` lists them. No other package
imports this package.
"""
