"""Kinds of layers with torch: one file each, with the record ``MIXER``.

A kind is complete with its file here and the file of its options in ``config/kinds``. `registry.py`
finds every module of this folder that has a ``MIXER``.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.layers.kinds.mixer_kind import MixerKind as MixerKind
    from megatron_packed.layers.kinds.registry import MIXERS as MIXERS
    from megatron_packed.layers.kinds.registry import kinds_of as kinds_of
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"mixer_kind": ["MixerKind"], "registry": ["MIXERS", "kinds_of"]}
    )
