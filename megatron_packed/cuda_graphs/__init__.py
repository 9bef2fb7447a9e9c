"""CUDA graphs of modules or whole steps, captured once and replayed over every pack that fits."""
