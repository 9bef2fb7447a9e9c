"""Training run of one process, from its configuration to its exit code.

``worker.py`` and ``from_python.py`` are its entries, ``pretrain.py`` builds the run in phases,
``trainer.py`` is the loop, and ``train_step.py`` is one step. The hooks of ``callback.py`` are called by
the loop; ``run_callbacks.py`` has the run's own periodic work in its order. Other packages have the rest
of a run: ``inputs`` has its data, ``resume`` its checkpoints, ``reporting`` its logs, and ``launch`` its
processes.

* A step (`Trainer.run`): load its micro-batches, queue forward, backward, reduction and update on the
  device (`TrainStep`), count it, and start the copy of its metrics to the host. Then wait for the
  metrics of the step before it, and log that step: hooks ``on_metrics``, console, writers, warnings,
  reasons to stop. Then call ``on_step_end`` of every callback. So the device always has a step to do.
* A validation (`Validate`): `Trainer.pause` logs the last step, so nothing is in flight. Then the packs
  of the validation are queued, their loss is summed over ranks, rank 0's value counts, and the record is
  logged. The lowest loss may be saved, and too many others stop the run. The clock of the next step
  starts afterwards.
* A save (`Save`, and once more at the end): `Trainer.pause`, then all ranks write one checkpoint
  (`RunState.save`), with the states of callbacks. With ``--async-save`` a thread writes it, and
  `ReportSaves` prints it after a later step.
* A stop: a signal, a time limit or `Trainer.request_stop` sets a flag on one rank, which is summed with
  the gradients of its next step. All ranks read the sum with that step's metrics, one step later, leave
  the loop together, log the last queued step, and save. See [Note: when a run may stop]. A non-finite
  step with ``--on-nonfinite stop`` ends the run in the same way. Early stopping and ``--exit-interval``
  depend on numbers that are equal on all ranks.
* A redone step: if an expert buffer overflows, the device holds that step and the queued one after it:
  neither changes weights. The host sees it in the metrics, runs the held step again with room for all
  rows, logs it, raises the bounds, and queues the following step again (`Trainer._redo`).
"""
