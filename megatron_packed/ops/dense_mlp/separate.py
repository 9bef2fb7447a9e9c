"""Dense MLPs whose products and activation are separate operations in forward and backward."""

JOINS = False
