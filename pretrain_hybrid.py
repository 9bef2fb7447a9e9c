"""Pretrain or fine-tune a hybrid Mamba-Transformer-MoE model on packed documents.

torchrun --nproc_per_node 2 pretrain_hybrid.py --help
"""

import sys

from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.config.standard_streams import guard_standard_streams


def explain(config: RunConfig) -> str:
    apply_environment(config.training)
    from megatron_packed.training.explain import explain

    return explain(config)


def main() -> None:
    guard_standard_streams()
    # Parsed before torch is imported, so that a wrong command line fails within a second.
    config = parse_or_exit(sys.argv[1:], explain)
    apply_environment(config.training)
    from megatron_packed.training.pretrain import pretrain

    pretrain(config)


if __name__ == "__main__":
    main()
