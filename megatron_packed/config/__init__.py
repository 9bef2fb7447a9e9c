"""Options of a run: their definitions, how they are read and checked, and how they are stored.

``sections`` defines the options by subject, ``parser`` reads command lines and files, and
``megatron`` lists Megatron-LM's flags. `RunConfig` holds all sections. Rules between sections are
in ``cross_rules.py``, checks of this machine in ``launch_checks.py`` and ``path_checks.py``.
Nothing in this package imports torch.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.environment_variables import apply_environment as apply_environment
    from megatron_packed.config.errors import ConfigError as ConfigError
    from megatron_packed.config.errors import Problem as Problem
    from megatron_packed.config.options import option as option
    from megatron_packed.config.parallel_layout import ParallelLayout as ParallelLayout
    from megatron_packed.config.parser.parse import parse as parse
    from megatron_packed.config.parser.parse import parse_or_exit as parse_or_exit
    from megatron_packed.config.run import RunConfig as RunConfig
    from megatron_packed.config.section import Section as Section
    from megatron_packed.config.serialise import from_dict as from_dict
    from megatron_packed.config.serialise import model_differences as model_differences
    from megatron_packed.config.serialise import model_hash as model_hash
    from megatron_packed.config.serialise import to_dict as to_dict
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "environment_variables": ["apply_environment"],
            "errors": ["ConfigError", "Problem"],
            "options": ["option"],
            "parallel_layout": ["ParallelLayout"],
            "parser.parse": ["parse", "parse_or_exit"],
            "run": ["RunConfig"],
            "section": ["Section"],
            "serialise": ["from_dict", "model_differences", "model_hash", "to_dict"],
        },
    )
