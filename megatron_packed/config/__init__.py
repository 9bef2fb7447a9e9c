"""Options of a run: their definitions, how they are read and checked, and how they are stored.

``sections`` defines the options by subject, ``parser`` reads command lines and files, and
``megatron`` lists Megatron-LM's flags. `RunConfig` holds all sections. Rules between sections are
in ``cross_rules.py``, checks of this machine in ``launch_checks.py`` and ``path_checks.py``.
Nothing in this package imports torch.
"""

from megatron_packed.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
