"""Checkpoints: safetensors files of each rank with a manifest, loaded in any parallel layout."""

from megatron_packed.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
