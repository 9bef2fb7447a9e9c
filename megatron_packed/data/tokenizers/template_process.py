"""Rendering of a chat template in a child process (`limited_process`); messages are JSON."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import BadLine
from megatron_packed.data.notes import Notes
from megatron_packed.data.tokenizers.chat_template import Rendered, TemplateError, Tools
from megatron_packed.data.tokenizers.conversation_documents import (
    ConversationRenderer,
    RenderedDocument,
    RenderingRules,
)
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
from megatron_packed.data.tokenizers.turn_markers import Messages

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
    """Renderer in a child process, with the methods of `conversation_documents.ConversationRenderer`.

    Only one thread at a time may use it.

    Args:
        source, variables, special_tokens, date: as for `ConversationRenderer`.
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
        variables: Mapping[str, Any],
        special_tokens: Sequence[str],
        date: str | None = None,
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        budget: Budget | None = None,
    ) -> None:
        setup = {
            "source": source,
            "variables": dict(variables),
            "special_tokens": list(special_tokens),
            "date": date,
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

    @property
    def turn_markers(self) -> frozenset[str]:
        """Return the turn markers; see `ConversationRenderer.turn_markers`."""
        return frozenset(self._ask("turn_markers")["tokens"])

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Render a prompt; see `ConversationRenderer.prompt`."""
        return str(self._ask("prompt", messages, tools)["text"])

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        """Render a conversation; see `ConversationRenderer.complete_text`."""
        return str(self._ask("complete_text", messages, tools)["text"])

    def conversation(
        self,
        messages: Messages,
        tools: Tools = None,
        rules: RenderingRules = RenderingRules(),  # noqa: B008 - immutable
    ) -> Rendered:
        """Render the last document of a conversation; see `ConversationRenderer.conversation`.

        Raises:
            BadLine: as for the renderer, or with the reason ``template_limit``.
            DataError: several successive conversations reached a limit, or slow conversations
                together exceeded the budget.
        """
        answer = self._ask("conversation", messages, tools, rules)
        return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])

    def documents(
        self,
        messages: Messages,
        tools: Tools = None,
        rules: RenderingRules = RenderingRules(),  # noqa: B008 - immutable
    ) -> tuple[list[RenderedDocument], Notes]:
        """Render a conversation to documents; see `ConversationRenderer.documents`.

        Raises:
            BadLine, DataError: as for `conversation`.
        """
        answer = self._ask("documents", messages, tools, rules)
        documents = [
            RenderedDocument(end, learned, text, [(start, stop) for start, stop in spans], served)
            for end, learned, text, spans, served in answer["documents"]
        ]
        return documents, Counter({(kind, name): count for kind, name, count in answer["notes"]})

    def close(self) -> None:
        self.process.close()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        method: str,
        messages: Messages | None = None,
        tools: Tools = None,
        rules: RenderingRules | None = None,
    ) -> dict[str, Any]:
        request = {"messages": messages, "tools": tools, "method": method, "rules": rules}
        try:
            body = json.dumps(request).encode()
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None
        try:
            answer: dict[str, Any] = json.loads(self.process.ask(body))
        except LimitReached as limit:
            raise BadLine("template_limit", str(limit)) from None
        if "reason" in answer:
            raise BadLine(answer["reason"], answer["detail"])
        return answer


# -------------------------------------------------------------------------------------------------------
# functions of the child process


_LATE_MODULES = (
    "html",
    "jinja2.debug",
    "logging",
    "pprint",
    "textwrap",
    *(f"encodings.{name}" for name in ("ascii", "latin_1", "unicode_escape", "utf_16", "utf_32")),
)
"""Modules that jinja2 3.1 and markupsafe import only when a template needs them, for example the
codec of escapes in texts. Nothing can be imported after the process is restricted.
"""


def serve() -> None:
    """Compile the template, then render one conversation per request.

    This function is the main function of the child.
    """
    for module in _LATE_MODULES:
        importlib.import_module(module)
    serve_requests(_prepare)


def _prepare(setup: dict[str, Any]) -> tuple[bytes, Answer]:
    try:
        renderer = ConversationRenderer(
            setup["source"], setup["variables"], setup["special_tokens"], setup["date"]
        )
    except MemoryError:
        raise TemplateError("the chat template exceeds its memory limit") from None
    return b"", lambda body: _answer(renderer, body)


def _answer(renderer: ConversationRenderer, body: bytes) -> bytes:
    limit = 8 * len(body) + 2**20
    try:
        request = json.loads(body)
        answer, texts = _called(renderer, request)
        for text in texts:
            if len(text) > limit:
                raise LimitReached(
                    f"a conversation of {len(body)} bytes became {len(text)} characters"
                )
    except BadLine as error:
        answer = {"reason": error.reason, "detail": error.detail}
    except RecursionError:
        answer = {"reason": "too_deep", "detail": "while rendering"}
    except MemoryError:
        raise LimitReached("out of memory") from None
    return json.dumps(answer).encode()


def _called(
    renderer: ConversationRenderer, request: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the answer to a request, and the texts that it contains."""
    method, conversation = request["method"], (request["messages"], request["tools"])
    if method == "turn_markers":
        return {"tokens": sorted(renderer.turn_markers)}, []
    if method in ("prompt", "complete_text"):
        text = getattr(renderer, method)(*conversation)
        return {"text": text}, [text]
    rules = RenderingRules(*request["rules"])
    if method == "conversation":
        rendered = renderer.conversation(*conversation, rules)
        return rendered._asdict(), [rendered.text]
    documents, notes = renderer.documents(*conversation, rules)
    counts = [[kind, name, count] for (kind, name), count in notes.items()]
    return {"documents": documents, "notes": counts}, [document.text for document in documents]
