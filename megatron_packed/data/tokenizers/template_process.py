"""Rendering of a chat template in a child process (`limited_process`); messages are JSON."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import Notes
from megatron_packed.data.tokenizers.chat_template import Rendered, TemplateError, Tools
from megatron_packed.data.tokenizers.conversation_documents import (
    ConversationRenderer,
    RenderedDocument,
    RenderingRules,
)
from megatron_packed.data.tokenizers.limited_process import (
    CPU_SECONDS,
    Budget,
    Call,
    GuardedObject,
    LimitReached,
    Limits,
    SetupRefused,
    serve_calls,
)
from megatron_packed.data.tokenizers.turn_markers import Messages

MAX_FAILURES = 3
"""Number of successive conversations over a limit after which the template raises an error."""


class TemplateProcess:
    """Renderer in child processes, with the methods of `conversation_documents.ConversationRenderer`.

    Each thread that renders uses its own process.

    Args:
        source, variables, special_tokens, date, rules: as for `ConversationRenderer`.
        cpu_seconds: limit of the CPU time for one conversation.
    Raises:
        TemplateError: the template does not compile within the limits.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        special_tokens: Sequence[str],
        date: str | None = None,
        rules: RenderingRules = RenderingRules(),  # noqa: B008 - immutable
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        cure = f"give another {flags.CHAT_TEMPLATE}"
        try:
            self._guarded = GuardedObject(
                __name__,
                [source, dict(variables), list(special_tokens), date, rules],
                Limits(cpu_seconds),
                Budget("the chat template", "conversations", cure, MAX_FAILURES),
                "template_limit",
            )
        except SetupRefused as error:
            raise TemplateError(str(error)) from None
        except LimitReached as limit:
            raise TemplateError(
                f"the chat template could not be compiled: {limit}; {cure}."
            ) from None

    @property
    def turn_markers(self) -> frozenset[str]:
        """Return the turn markers; see `ConversationRenderer.turn_markers`."""
        return frozenset(self._guarded.call("turn_markers")[0])

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Render a prompt; see `ConversationRenderer.prompt`."""
        return str(self._guarded.call("prompt", messages, tools)[0])

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        """Render a conversation; see `ConversationRenderer.complete_text`."""
        return str(self._guarded.call("complete_text", messages, tools)[0])

    def conversation(
        self,
        messages: Messages,
        tools: Tools = None,
    ) -> Rendered:
        """Render the last document of a conversation; see `ConversationRenderer.conversation`.

        Raises:
            BadLine: as for the renderer, or with the reason ``template_limit``.
            DataError: several successive conversations reached a limit, or slow conversations
                together exceeded the budget.
        """
        text, spans = self._guarded.call("conversation", messages, tools)[0]
        return Rendered(text, [(start, end) for start, end in spans])

    def documents(
        self,
        messages: Messages,
        tools: Tools = None,
    ) -> tuple[list[RenderedDocument], Notes]:
        """Render a conversation to documents; see `ConversationRenderer.documents`.

        Raises:
            BadLine, DataError: as for `conversation`.
        """
        rendered, notes = self._guarded.call("documents", messages, tools)[0]
        documents = [
            RenderedDocument(end, learned, text, [(start, stop) for start, stop in spans], served)
            for end, learned, text, spans, served in rendered
        ]
        return documents, Counter({(kind, name): count for kind, name, count in notes})

    def close(self) -> None:
        self._guarded.close()


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
    serve_calls(_compile)


def _compile(
    source: str,
    variables: dict[str, Any],
    special_tokens: list[str],
    date: str | None,
    rules: list[bool],
) -> Call:
    arguments = source, variables, special_tokens, date, RenderingRules(*rules)
    try:
        return partial(_call, ConversationRenderer(*arguments))
    except MemoryError:
        raise TemplateError("the chat template exceeds its memory limit") from None


def _call(
    renderer: ConversationRenderer, num_bytes: int, method: str, *conversation: Any
) -> tuple[Any, bytes]:
    """Call a method of the renderer; refuse texts that are far longer than the request."""
    if method == "turn_markers":
        return sorted(renderer.turn_markers), b""
    value = getattr(renderer, method)(*conversation)
    texts = [value[0] if method == "conversation" else value]
    if method == "documents":
        documents, notes = value
        texts = [document.text for document in documents]
        value = documents, [[*note, count] for note, count in notes.items()]
    longest = max(map(len, texts), default=0)
    if longest > 8 * num_bytes + 2**20:
        raise LimitReached(f"a conversation of {num_bytes} bytes became {longest} characters")
    return value, b""
