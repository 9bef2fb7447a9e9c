"""Training of hybrid Mamba-Transformer-MoE models on packed sequences.

Importing the package does not import torch or an optional kernel library. Each name is imported when
it is first used.
"""

from megatron_packed.lazy_exports import lazy_exports

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
