"""``megatron-packed doctor``: report installed packages, which of them work on this machine, and
their replacements.
"""
