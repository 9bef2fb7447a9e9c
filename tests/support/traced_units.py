"""Memory of single layers on the meta device, for tests of the estimate."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.memory_purpose import Purpose
from megatron_packed.models.estimate.live_memory import Amounts, LiveMemory
from megatron_packed.models.estimate.step_memory import MetaStep, Work
from megatron_packed.models.estimate.unit_memory import UnitMemory
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.torch_private import current_graph_task_id
from support.hybrid_cases import VOCAB


class ByPurpose(LiveMemory):
    """`LiveMemory` that also notes the most bytes of each purpose in forward and backward."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__(ignored)
        self.most: dict[str, Counter[Purpose]] = {"forward": Counter(), "backward": Counter()}
        self._at_last = 0
        self.freed_at_end = 0
        """Bytes that the forward pass frees after its last allocation."""

    def note(self, more: Amounts | None = None, op: str = "") -> None:
        super().note(more, op)
        direction = "forward" if current_graph_task_id() == -1 else "backward"
        self.most[direction] |= self.amounts()
        if direction == "forward":
            self._at_last = self.amounts().total()

    def keep_received(self) -> None:
        super().keep_received()
        self.freed_at_end = self._at_last - self.amounts().total()


def units_of(model: HybridModel, work: Work) -> list[UnitMemory]:
    """Return the memory of each unit of layers, in order."""
    return list(MetaStep(model, work).units().values())


def first_unit(
    config: ModelConfig, backends: dict[str, str], memory: MemoryConfig | None = None
) -> UnitMemory:
    """Return the memory of the first layers of a model in bf16, for packs of 4,096 tokens."""
    model = HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=256,
        device="meta",
        dtype=torch.bfloat16,
        backends=backends,
        memory=memory,
    )
    return units_of(model, Work(tokens=4096, documents=16))[0]


def saved_bytes(unit: UnitMemory) -> int:
    """Return the bytes that a unit saves in addition to its input."""
    return sum(unit.saved.values())


def of_first_layer(model: HybridModel, work: Work) -> ByPurpose:
    """Return the counter of the first layer, which ran alone."""
    counters: list[ByPurpose] = []

    def counter(ignored: Iterable[Tensor]) -> ByPurpose:
        counters.append(ByPurpose(ignored))
        return counters[-1]

    MetaStep(model, work).units(counter)
    return counters[0]


def most_by_purpose(model: HybridModel, work: Work) -> dict[str, Counter[Purpose]]:
    """Return the most bytes of each purpose while the first layer runs alone."""
    return of_first_layer(model, work).most
