"""Mixture of experts: router, dispatch of tokens to experts, experts, combination of results."""
