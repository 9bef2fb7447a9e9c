"""Generation with the layers of a model: the state that a mixer keeps of each document.

`state.py` has the interface, and one file has the state of each kind of mixer.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.layers.decoding.state import MixerState as MixerState
    from megatron_packed.layers.decoding.state import NextTokens as NextTokens
    from megatron_packed.layers.decoding.states import DecodedLayer as DecodedLayer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"state": ["MixerState", "NextTokens"], "states": ["DecodedLayer"]}
    )
