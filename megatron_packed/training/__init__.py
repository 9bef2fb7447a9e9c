"""Training run of one process, from its configuration to its exit code.

``pretrain.py`` builds the run in phases, ``trainer.py`` is the training loop, and ``train_step.py``
is one step of the loop. Other packages have the rest of a run: ``inputs`` has its data, ``resume`` its
checkpoints, ``reporting`` its logs, and ``launch`` its processes.
"""
