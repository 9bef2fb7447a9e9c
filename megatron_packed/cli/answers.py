"""Output of generated answers: token by token for one prompt, answer by answer for several."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from megatron_packed.data.tokenizers.base import answer_text

if TYPE_CHECKING:
    from megatron_packed.data.tokenizers.base import Tokenizer
    from megatron_packed.inputs.prompts import GivenPrompt

_INCOMPLETE = "\ufffd"
"""Character that a tokenizer decodes from the first bytes of a character."""


def shown_text(text: str) -> str:
    """Return text for the output, with ``?`` for control characters other than line end and tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


class Answers(ABC):
    """Printer of answers, called with the number of a prompt and its next token.

    Args:
        tokenizer: decodes the tokens.
        prompts: the prompts.
        ends: tokens that end an answer.
        max_new_tokens: largest number of tokens of an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[GivenPrompt],
        ends: Collection[int],
        max_new_tokens: int,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.prompts = prompts
        self._tokenizer = tokenizer
        self._ends = ends
        self._max_new_tokens = max_new_tokens
        self._printed = 0

    def __call__(self, number: int, token: int) -> None:
        self.tokens[number].append(token)
        self.progress()
        # Answers end in any order, but they are printed in the order of the prompts.
        while self._printed < len(self.prompts) and self._is_complete(self._printed):
            self.answer(self._printed)
            self._printed += 1

    def progress(self) -> None:  # noqa: B027
        """Print what is new after a token; by default nothing, until an answer is complete."""

    @abstractmethod
    def answer(self, number: int) -> None:
        """Print a complete answer."""

    def text(self, number: int) -> str:
        return answer_text(self._tokenizer, self.tokens[number])

    def _is_complete(self, number: int) -> bool:
        tokens = self.tokens[number]
        return len(tokens) == self._max_new_tokens or (bool(tokens) and tokens[-1] in self._ends)


class LiveAnswer(Answers):
    """Printer of the answer of one prompt; with ``live`` each token is printed as it comes."""

    def __init__(self, *arguments: Any, live: bool) -> None:
        super().__init__(*arguments)
        self._live = live
        self._shown = ""

    def progress(self) -> None:
        # The end of the text may change with the next token: white space is cut from the answer,
        # and a character may have several tokens.
        text = shown_text(self.text(0).rstrip(_INCOMPLETE).rstrip()) if self._live else ""
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text

    def answer(self, number: int) -> None:
        text = shown_text(self.text(number))
        if not text.startswith(self._shown):  # later tokens changed the text of earlier tokens
            print()
            self._shown = ""
        print(text[len(self._shown) :], flush=True)
        if not text:
            print(
                "no text: the model generated only white space and special tokens "
                f"({len(self.tokens[number])} in all).",
                file=sys.stderr,
            )


class LabelledAnswers(Answers):
    """Printer of each prompt and its answer as text for a reader."""

    def answer(self, number: int) -> None:
        prompt = self.prompts[number]
        print(f"{number + 1}. {shown_text(prompt.shown)}\n{shown_text(self.text(number))}")
        if prompt.expected is not None:
            print(f"(expected: {shown_text(prompt.expected)})")
        print(flush=True)


class JsonAnswers(Answers):
    """Printer of one JSON object per prompt, with ``prompt``, ``answer`` and perhaps ``expected``."""

    def answer(self, number: int) -> None:
        prompt = self.prompts[number]
        line = {"prompt": prompt.shown, "answer": self.text(number)}
        if prompt.expected is not None:
            line["expected"] = prompt.expected
        text = json.dumps(line, ensure_ascii=False)
        # JSON needs no escape for some control characters, but a terminal would obey them.
        print(
            "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text),
            flush=True,
        )
