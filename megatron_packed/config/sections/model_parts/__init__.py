"""Options of `ModelConfig`, one module for each subject; those of kinds of layers are in ``config.kinds``."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.sections.model_parts.stack import StackOptions as StackOptions
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, {"stack": ["StackOptions"]})
