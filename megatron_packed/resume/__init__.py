"""Continuation of a run from a checkpoint: what the run may change, its phases, and its state.

``phases_and_stored_packs.py`` reads what a run needs before it opens its data.
``run_and_random_state.py`` saves and loads a run; ``held_state.py`` lists its tensors, and
``callback_state.py`` those of callbacks. ``allowed_changes.py`` refuses other changes, and
``restore.py`` decides where the weights come from and prints what has changed.
"""
