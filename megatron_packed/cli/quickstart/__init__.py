"""``megatron-packed quickstart``: a small model, trained on questions about Python's documentation."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.cli.quickstart.questions import Question as Question
    from megatron_packed.cli.quickstart.questions import write_questions as write_questions
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "questions": ["Question", "write_questions"],
        },
    )
