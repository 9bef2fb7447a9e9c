"""Packing of documents, and the plan of packs for each step, rank and micro-batch."""
