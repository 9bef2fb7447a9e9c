"""Training run of one process, from its configuration to its exit code.

``pretrain.py`` builds the run in phases, ``trainer.py`` is the training loop, and ``train_step.py``
is one step of the loop. Other packages have the rest of a run: ``inputs`` has its data, ``resume`` its
checkpoints, ``reporting`` its logs, and ``launch`` its processes.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.training.build_graphs import capture_graphs as capture_graphs
    from megatron_packed.training.build_job import Job as Job
    from megatron_packed.training.from_python import train as train
    from megatron_packed.training.train_step import TrainStep as TrainStep
    from megatron_packed.training.trained_model import TrainedModel as TrainedModel
    from megatron_packed.training.trainer import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "build_graphs": ["capture_graphs"],
            "build_job": ["Job"],
            "from_python": ["train"],
            "train_step": ["TrainStep"],
            "trained_model": ["TrainedModel"],
            "trainer": ["Trainer"],
        },
    )
