"""Parser of the command line, the configuration file and the environment into a `RunConfig`.

``precedence.py`` decides which source sets each option. ``parse.py`` collects all problems before
it reports them. ``help_text.py`` and ``print_config.py`` write the output of ``--help`` and
``--print-config``.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.parser.config_file import read_config_file as read_config_file
    from megatron_packed.config.parser.flag_registry import known_flags as known_flags
    from megatron_packed.config.parser.flag_registry import spellings as spellings
    from megatron_packed.config.parser.parse import parse_or_exit as parse_or_exit
    from megatron_packed.config.parser.parse import parse_with_sources as parse_with_sources
    from megatron_packed.config.parser.precedence import GivenOptions as GivenOptions
    from megatron_packed.config.parser.precedence import gather as gather
    from megatron_packed.config.parser.print_config import config_yaml as config_yaml
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config_file": ["read_config_file"],
            "flag_registry": ["known_flags", "spellings"],
            "parse": ["parse_or_exit", "parse_with_sources"],
            "precedence": ["GivenOptions", "gather"],
            "print_config": ["config_yaml"],
        },
    )
