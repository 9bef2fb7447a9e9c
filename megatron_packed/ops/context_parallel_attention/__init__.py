"""Attention over sequences that are split over context-parallel ranks in zigzag layout."""
