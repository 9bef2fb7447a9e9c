"""Pretrain or fine-tune a hybrid Mamba-Transformer-MoE model on packed documents.

torchrun --nproc_per_node 2 pretrain_hybrid.py --help

``megatron-packed train --nproc-per-node 2 --help`` starts the same processes without torchrun.
"""

from megatron_packed.training.worker import run_worker

if __name__ == "__main__":
    run_worker()
