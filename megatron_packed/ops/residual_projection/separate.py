"""Product and addition as separate operations."""

added_product = None
"""No `api.AddedProduct`: the product adds nothing."""
