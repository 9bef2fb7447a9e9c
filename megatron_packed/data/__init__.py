"""Training data: source files, tokens, packs, and micro-batches.

``sources`` reads files and caches tokens, ``tokenizers`` encodes text, ``index`` reads and writes
Megatron-LM's indexed data sets, and ``packing`` decides which documents share a pack.
"""
