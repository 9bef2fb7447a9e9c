"""Training run, from its configuration to its exit code.

``pretrain.py`` builds the run in phases, ``trainer.py`` is the training loop, and ``train_step.py``
is one step of the loop.
"""
