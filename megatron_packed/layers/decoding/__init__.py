"""Generation with the layers of a model: the state that a mixer keeps of each document.

`state.py` has the interface. A kind's file in ``layers/kinds`` names the state of its mixer.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.layers.decoding.decoded_layer import DecodedLayer as DecodedLayer
    from megatron_packed.layers.decoding.state import MixerState as MixerState
    from megatron_packed.layers.decoding.state import NextTokens as NextTokens
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"decoded_layer": ["DecodedLayer"], "state": ["MixerState", "NextTokens"]}
    )
