"""Answers of the model between steps: sample prompts, and the task metric of validations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_packed.data.tokenizers.base import Tokenizer, answer_text
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import DeviceWatch
from megatron_packed.models.generate import generate
from megatron_packed.reporting.console import Sample
from megatron_packed.training.train_step import TrainStep

if TYPE_CHECKING:
    from megatron_packed.inputs.sample_and_metric_prompts import Questions


@dataclass(frozen=True, kw_only=True)
class TrainingAnswers:
    """Generation of answers between steps; every method is a collective of all ranks.

    Answers are greedy. They change no state of the run: see `generate`.
    """

    step: TrainStep
    """The training step, whose model answers."""
    groups: ParallelGroups
    tokenizer: Tokenizer
    hang_detector: DeviceWatch
    samples: Questions | None
    metric: Questions | None

    def matches(self) -> float:
        """Return the share of answers to the task metric that equal the answers of the data."""
        assert self.metric is not None
        answers = self._texts(self.metric)
        same = sum(answer == right for answer, right in zip(answers, self.metric.expected))
        # Only rank 0 has the texts of the answers.
        count: int = all_gather_json(same, self.groups)[0]
        return count / len(self.metric.prompts)

    def sample(self) -> list[Sample]:
        """Return the prompts with their answers; on other ranks than rank 0 an empty list."""
        assert self.samples is not None
        prompts_with_answers = zip(
            self.samples.shown, self._texts(self.samples), self.samples.expected
        )
        return [
            {"prompt": prompt, "answer": answer, **({} if right is None else {"expected": right})}
            for prompt, answer, right in prompts_with_answers
        ]

    def _texts(self, questions: Questions) -> list[str]:
        """Return the answers as texts on rank 0; on other ranks an empty list."""
        with self.hang_detector.idle():
            # With overlap, gathers of parameters may still run.
            self.step.buffers.wait_params()
            tokens = generate(
                self.step.model,
                questions.prompts,
                questions.max_new_tokens,
                ends=questions.ends,
                group=self.groups.world_group,
            )
            if self.groups.rank != 0:
                return []
            return [answer_text(self.tokenizer, answer) for answer in tokens]
