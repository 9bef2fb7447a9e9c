"""Print every flag of Megatron-LM's parser, one per line, from a checkout of its repository.

    python tools/megatron_flag_names.py MEGATRON_CHECKOUT

The flags of its training programs and of ModelOpt are printed. ``tests/unit/config/megatron_flag_names.txt`` has those
of d98e8a64, and flags of older versions, of open pull requests and of the program for elastic models.
"""

from __future__ import annotations

import argparse
import sys
import typing


def flag_names(checkout: str) -> set[str]:
    """Return the spellings of Megatron's own parser, which is imported from ``checkout``."""
    sys.path.insert(0, checkout)
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda method: method
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_modelopt_args(add_megatron_arguments(parser))
    return {flag for action in parser._actions for flag in action.option_strings}


if __name__ == "__main__":
    print("\n".join(sorted(flag_names(sys.argv[1]))))
