"""`MIXERS`: the kinds of layers of all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.layers import kinds
from megatron_packed.layers.kinds.mixer_kind import MixerKind

_MODULES = [
    import_module(f"{kinds.__name__}.{module.name}") for module in iter_modules(kinds.__path__)
]
MIXERS: dict[str, MixerKind] = {
    module.MIXER.kind.symbol: module.MIXER for module in _MODULES if hasattr(module, "MIXER")
}
"""Symbol in the layer pattern -> kind of layer."""
if incomplete := [kind.name for symbol, kind in KINDS.items() if symbol not in MIXERS]:
    raise ImportError(f"no file of layers/kinds has a MIXER of the kind {', '.join(incomplete)}")


def kinds_of(layer_types: Iterable[str]) -> list[MixerKind]:
    """Return the kinds of a model's layers, each once, in the order of the layers."""
    return [MIXERS[symbol] for symbol in dict.fromkeys(layer_types)]
