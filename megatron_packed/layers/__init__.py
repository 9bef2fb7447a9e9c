"""Layers of a hybrid model on packed sequences, for any tensor- and context-parallel size."""
