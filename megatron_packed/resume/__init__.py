"""Continuation of a run from a checkpoint: what the run may change, its phases, and its state.

``phases_and_stored_packs.py`` reads what a run needs before it opens its data.
``run_and_random_state.py`` saves and loads a run, ``allowed_changes.py`` refuses other changes, and
``restore.py`` decides where the weights come from and prints what has changed.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.resume.load_for_inference import load_model as load_model
    from megatron_packed.resume.phases_and_stored_packs import Resumed as Resumed
    from megatron_packed.resume.run_and_random_state import RunState as RunState
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "load_for_inference": ["load_model"],
            "phases_and_stored_packs": ["Resumed"],
            "run_and_random_state": ["RunState"],
        },
    )
