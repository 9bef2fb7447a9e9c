"""Start of the patch: Python imports this file at start-up if the folder is on PYTHONPATH.

Python imports only the first ``sitecustomize`` of ``sys.path``. A distribution, a cluster or a
virtual environment may have its own ``sitecustomize`` in a later folder. This file therefore runs
the next one. That module becomes ``sys.modules["sitecustomize"]``, and Python reports its errors
as usual. The patch itself never raises at start-up.
"""

import os
import sys
from importlib.machinery import PathFinder

SWITCH = "MEGATRON_PACKED_TE_PATCHES"


def _arm():
    """Install the patch for a later import of TransformerEngine, unless the variable SWITCH is 0."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        import te_thd_patch

        te_thd_patch.install()
    except Exception as error:  # an error of the patch must not stop the interpreter
        if sys.stderr is not None:
            sys.stderr.write(
                f"te_patches: not armed, TransformerEngine is left untouched: {error!r}\n"
            )


def _run_next(started):
    """Run the next ``sitecustomize`` after this folder on ``sys.path`` that is not in ``started``.

    Another ``sitecustomize`` may run the first one of ``sys.path`` in the same way, and so this
    file again. ``started`` outlives this module, so that each file runs once.
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
    )  # imported here because it is slow and seldom needed

    started.append(spec.origin)
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_arm()
_run_next(
    vars(
        sys.modules.setdefault("_te_patches_started", type(sys)("_te_patches_started"))
    ).setdefault("files", [])
)
