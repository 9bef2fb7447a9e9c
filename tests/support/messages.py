"""Messages of conversations, as lines of data have them."""

from functools import partial
from typing import Any


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


system, user, assistant, tool = (
    partial(message, role) for role in ("system", "user", "assistant", "tool")
)
