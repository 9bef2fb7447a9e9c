"""`MIXERS`: the kinds of layers of all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from megatron_packed.config.kinds.layer_kind import KINDS, record_of
from megatron_packed.layers import kinds
from megatron_packed.layers.kinds.mixer_kind import MixerKind


def _mixers() -> dict[str, MixerKind]:
    mixers: dict[str, MixerKind] = {}
    for module in iter_modules(kinds.__path__):
        path = f"{kinds.__name__}.{module.name}"
        mixer = record_of(import_module(path), "MIXER", MixerKind)
        if mixer is not None and mixers.setdefault(mixer.kind.symbol, mixer) is not mixer:
            raise ImportError(f"{path} has a second MIXER of the kind {mixer.kind.name}")
    return mixers


MIXERS = _mixers()
"""Symbol in the layer pattern -> kind of layer."""
if incomplete := [kind.name for symbol, kind in KINDS.items() if symbol not in MIXERS]:
    raise ImportError(f"no file of layers/kinds has a MIXER of the kind {', '.join(incomplete)}")
if unknown := [mixer.kind.name for symbol, mixer in MIXERS.items() if symbol not in KINDS]:
    raise ImportError(f"no file of config/kinds has the KIND of the MIXER of {', '.join(unknown)}")


def kinds_of(layer_types: Iterable[str]) -> list[MixerKind]:
    """Return the kinds of a model's layers, each once, in the order of the layers."""
    return [MIXERS[symbol] for symbol in dict.fromkeys(layer_types)]
