"""Activation functions of MLPs, including the gated SwiGLU."""
