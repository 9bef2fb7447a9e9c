"""Configuration of a run, for tests of its data."""

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.inputs import run_data as run_data

SLOTS, SEED = 2048, 5


def run_config(
    graphs: dict | None = None, data: dict | None = None, seq_length: int = SLOTS, **packing
) -> RunConfig:
    packing = {"overlong_policy": "truncate", **packing}
    packing = {"seq_length": seq_length, "global_batch_size": 4, "packing_window": 256, **packing}
    training = (
        {"train_iters": 10, "seed": SEED, "eval_interval": 5}
        if data
        else {"train_iters": 10, "seed": SEED}
    )
    return RunConfig(
        model=ModelConfig(hybrid_layer_pattern="-", hidden_size=8),
        packing=PackingConfig(**packing),
        data=DataConfig(**data or {"data_path": ("train.jsonl",)}),
        optim=OptimizerConfig(lr=0.1),
        training=TrainingConfig(**training),
        cuda_graph=CudaGraphConfig(**{"cuda_graph_impl": "local"} if graphs is None else graphs),
    )
