"""Logits of a router: product of rows with a weight in float32."""
