"""Rendering of a chat template in a child process (`limited_process`); messages are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import BadLine
from megatron_packed.data.tokenizers.chat_template import Rendered, TemplateError, TemplateRenderer
from megatron_packed.data.tokenizers.limited_process import (
    CPU_SECONDS,
    MEMORY_BYTES,
    Answer,
    Budget,
    LimitedProcess,
    LimitReached,
    Limits,
    SetupRefused,
    serve_requests,
)

MAX_FAILURES = 3
"""Number of successive conversations over a limit after which the template raises an error."""


def template_budget() -> Budget:
    """Return the limit of CPU time for the slow conversations of a data set."""
    return Budget(
        "the chat template",
        "conversations",
        f"give another {flags.CHAT_TEMPLATE}",
        max_in_a_row=MAX_FAILURES,
    )


class TemplateProcess:
    """Renderer in a child process, with the methods of `chat_template.TemplateRenderer`.

    Only one thread at a time may use it.

    Args:
        source, variables, special_tokens: as for `TemplateRenderer`.
        cpu_seconds: limit of the CPU time for one conversation.
        memory_bytes: limit of the memory of the process.
        budget: limit of slow conversations, shared by the processes of a data set; None for a
            separate budget.
    Raises:
        TemplateError: the template does not compile within the limits.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        special_tokens: Sequence[str],
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        budget: Budget | None = None,
    ) -> None:
        setup = {
            "source": source,
            "variables": dict(variables),
            "special_tokens": list(special_tokens),
        }
        limits = Limits(cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        try:
            self.process = LimitedProcess(__name__, setup, limits, budget or template_budget())
        except SetupRefused as error:
            raise TemplateError(str(error)) from None
        except LimitReached as limit:
            raise TemplateError(
                f"the chat template could not be compiled: {limit}; give another {flags.CHAT_TEMPLATE}."
            ) from None

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Render a prompt; see `TemplateRenderer.prompt`."""
        return str(self._ask("prompt", messages, tools)["text"])

    def conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> Rendered:
        """Render a conversation; see `TemplateRenderer.conversation`.

        Raises:
            BadLine: as for the renderer, or with the reason ``template_limit``.
            DataError: several successive conversations reached a limit, or slow conversations
                together exceeded the budget.
        """
        return self._rendered("conversation", messages, tools)

    def answers(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation; see `TemplateRenderer.answers`.

        Raises:
            BadLine, DataError: as for `conversation`.
        """
        return self._rendered("answers", messages, tools)

    def everything(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> Rendered:
        """Render a conversation to train on all text; see `TemplateRenderer.everything`.

        Raises:
            BadLine, DataError: as for `conversation`.
        """
        return self._rendered("everything", messages, tools)

    def _rendered(
        self, method: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> Rendered:
        answer = self._ask(method, messages, tools)
        return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])

    def close(self) -> None:
        """End the child."""
        self.process.close()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, method: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> dict[str, Any]:
        try:
            request = json.dumps({"messages": messages, "tools": tools, "method": method}).encode()
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None
        try:
            answer: dict[str, Any] = json.loads(self.process.ask(request))
        except LimitReached as limit:
            raise BadLine("template_limit", str(limit)) from None
        if "reason" in answer:
            raise BadLine(answer["reason"], answer["detail"])
        return answer


# -------------------------------------------------------------------------------------------------------
# functions of the child process


def serve() -> None:
    """Compile the template, then render one conversation per request.

    This function is the main function of the child.
    """
    serve_requests(_prepare)


def _prepare(setup: dict[str, Any]) -> tuple[bytes, Answer]:
    try:
        renderer = TemplateRenderer(setup["source"], setup["variables"], setup["special_tokens"])
    except MemoryError:
        raise TemplateError("the chat template exceeds its memory limit") from None
    return b"", lambda body: _answer(renderer, body)


def _answer(renderer: TemplateRenderer, body: bytes) -> bytes:
    limit = 8 * len(body) + 2**20
    try:
        request = json.loads(body)
        arguments = (request["messages"], request["tools"])
        answer: dict[str, Any] = {}
        if request["method"] == "prompt":
            answer["text"] = renderer.prompt(*arguments)
        else:
            methods = {
                "conversation": renderer.conversation,
                "answers": renderer.answers,
                "everything": renderer.everything,
            }
            answer = methods[request["method"]](*arguments)._asdict()
        if len(answer["text"]) > limit:
            raise LimitReached(
                f"a conversation of {len(body)} bytes became {len(answer['text'])} characters"
            )
    except BadLine as error:
        answer = {"reason": error.reason, "detail": error.detail}
    except RecursionError:
        answer = {"reason": "too_deep", "detail": "while rendering"}
    except MemoryError:
        raise LimitReached("out of memory") from None
    return json.dumps(answer).encode()
