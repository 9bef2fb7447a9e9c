"""Chat template for a server: it prints what the template of the training prints.

A server renders with the jinja2 of transformers, or with a smaller implementation of jinja2. It has
no use for ``{% generation %}`` blocks, and it does not get the variables of
``--chat-template-kwargs``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from jinja2 import meta, nodes

from megatron_packed.data.tokenizers.chat_template import template_environment

_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def served_template(source: str, kwargs: str | None = None, defined: Collection[str] = ()) -> str:
    """Return a template that prints the same text as ``source`` in the training.

    ``{% generation %}`` blocks become plain blocks. Variables of the training are the defaults of
    the result, so that a server can still set others.

    Args:
        source: a template that compiles.
        kwargs: value of ``--chat-template-kwargs``.
        defined: variables that a server sets in any case, such as ``bos_token``.
    """
    parsed = template_environment().parse(source)
    begin, end = ("with", "endwith") if _assigns_in_blocks(parsed) else ("if true", "endif")
    read = meta.find_undeclared_variables(parsed)
    values = {name: value for name, value in json.loads(kwargs or "{}").items() if name in read}

    def plain(match: re.Match[str]) -> str:
        left, ends, right = match.groups()
        return f"{{%{left} {end if ends else begin} {right}%}}"

    return _defaults(values, defined) + _BLOCK.sub(plain, source)


def _assigns_in_blocks(parsed: nodes.Template) -> bool:
    """Return whether a generation block sets a variable, which ends with the block.

    The variable of an ``if`` block would stay. All else is equal in both, and ``if`` is known to
    more implementations of jinja2 than ``with``.
    """
    targets: list[nodes.Node] = []
    for block in parsed.find_all(nodes.CallBlock):
        targets += [assigned.target for assigned in block.find_all(nodes.Assign)]
        targets += [assigned.target for assigned in block.find_all(nodes.AssignBlock)]
    return any(isinstance(target, (nodes.Name, nodes.Tuple)) for target in targets)


def _defaults(values: dict[str, Any], defined: Collection[str]) -> str:
    """Return statements that set variables, each on a line of its own, which prints nothing."""
    lines = []
    for name, value in values.items():
        statement = f"{{% set {name} = {_literal(value)} %}}"
        if name not in defined:
            statement = f"{{% if {name} is not defined %}}{statement}{{% endif %}}"
        lines.append(statement + "\n")
    return "".join(lines)


def _literal(value: Any) -> str:
    """Return a value of JSON as an expression of jinja2."""
    if isinstance(value, dict):
        parts = (f"{_literal(key)}: {_literal(part)}" for key, part in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)
