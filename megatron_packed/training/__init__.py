"""Training run, from its configuration to its exit code.

``pretrain.py`` builds the run in phases, ``trainer.py`` is the training loop, and ``train_step.py``
is one step of the loop.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.training.build_graphs import capture_graphs as capture_graphs
    from megatron_packed.training.build_job import Job as Job
    from megatron_packed.training.build_job import build_model as build_model
    from megatron_packed.training.from_python import train as train
    from megatron_packed.training.load_for_inference import load_model as load_model
    from megatron_packed.training.run_data import RunData as RunData
    from megatron_packed.training.run_data import build_data as build_data
    from megatron_packed.training.train_step import TrainStep as TrainStep
    from megatron_packed.training.trained_model import TrainedModel as TrainedModel
    from megatron_packed.training.trainer import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "build_graphs": ["capture_graphs"],
            "build_job": ["Job", "build_model"],
            "from_python": ["train"],
            "load_for_inference": ["load_model"],
            "run_data": ["RunData", "build_data"],
            "train_step": ["TrainStep"],
            "trained_model": ["TrainedModel"],
            "trainer": ["Trainer"],
        },
    )
