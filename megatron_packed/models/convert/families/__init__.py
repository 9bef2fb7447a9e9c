"""Supported Hugging Face families, one module for each kin of families.

``family.py`` describes what a family consists of. ``registry.py`` lists all families.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.models.convert.families.family import Family as Family
    from megatron_packed.models.convert.families.registry import FAMILIES as FAMILIES
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"family": ["Family"], "registry": ["FAMILIES"]}
    )
