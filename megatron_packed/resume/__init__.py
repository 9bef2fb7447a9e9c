"""Continuation of a run from a checkpoint: what the run may change, its phases, and its state.

``compared_runs.py`` has the run that saved the checkpoint and the run that starts from it, and
``allowed_changes.py`` the table of changes. ``run_and_random_state.py`` saves and loads a run;
``held_state.py`` lists its tensors, and ``callback_state.py`` those of callbacks. ``restore.py``
decides where the weights come from and prints what has changed.
"""
