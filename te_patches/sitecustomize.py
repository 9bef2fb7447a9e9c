"""Runs when an interpreter starts with this folder on PYTHONPATH: arms the patch, then runs who it
stands in front of.

Python imports only the first ``sitecustomize`` of ``sys.path``. A distribution, a cluster or a
virtual environment may have one of its own further down; it runs next, exactly as it would have
without this folder: it is ``sys.modules["sitecustomize"]`` afterwards, and an error in it is
reported by Python as ever. The patch itself never raises here.
"""

import os
import sys
from importlib.machinery import PathFinder

SWITCH = "MEGATRON_PACKED_TE_PATCHES"


def _arm():
    """Waits for TransformerEngine to be imported, unless the switch in the environment is 0."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        import te_thd_patch

        te_thd_patch.install()
    except Exception as error:  # an interpreter must start whatever is wrong with a patch
        if sys.stderr is not None:
            sys.stderr.write(
                f"te_patches: not armed, TransformerEngine is left untouched: {error!r}\n"
            )


def _run_next(started):
    """Runs the first ``sitecustomize`` behind this folder on ``sys.path`` that is not in
    ``started``, if there is one.

    Another one may pass on in the same way, to whatever comes first, and so back to this folder:
    ``started`` outlives this module and takes care that each runs once.
    """
    here = os.path.dirname(os.path.realpath(__file__))
    behind = next(
        (i + 1 for i, folder in enumerate(sys.path) if os.path.realpath(folder) == here), 0
    )
    for folder in sys.path[behind:]:
        spec = PathFinder.find_spec("sitecustomize", [folder])
        if spec is not None and spec.loader is not None and spec.origin not in started:
            break
    else:
        return
    from importlib.util import (
        module_from_spec,
    )  # would be most of what a start costs, and is seldom needed

    started.append(spec.origin)
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_arm()
_run_next(
    vars(
        sys.modules.setdefault("_te_patches_started", type(sys)("_te_patches_started"))
    ).setdefault("files", [])
)
