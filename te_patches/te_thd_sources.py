"""Known releases of TransformerEngine, and replacement of their host syncs in syntax trees.

This module is loaded when TransformerEngine is imported, not when the interpreter starts. It reads
source text and imports nothing from TransformerEngine, so its result depends only on the text.
"""

from __future__ import annotations

import ast
import hashlib
from ast import Attribute, Call, Constant, Load, Name, Slice, Subscript, Tuple

from te_thd_patch import MODULES, Refused

FIXED_IN = (2, 18)
_BEFORE, _AFTER = (
    "reorder_seq_chunks_before_a2a_after_attn_thd",
    "reorder_seq_chunks_after_a2a_before_attn_thd",
)
FUNCTIONS = {
    "DotProductAttention.forward": MODULES[0],
    **dict.fromkeys(("AttnFuncWithCPAndKVP2P.backward", _BEFORE, _AFTER), MODULES[1]),
}
"""Module of each function that waits for the GPU."""

STAND_INS = {_BEFORE: "to_rank_order", _AFTER: "to_sequence_order"}
"""Stand-in of each function that is replaced as a whole; it takes the same arguments."""

_A2A = ("291fcbc3d64fde71", "ec86b34747276c1c")
_FINGERPRINTS = {
    "2.3.0": ("4cf6a89c5363f0ea", "69ccfef1b0cf5500"),
    "2.4.0": ("4cf6a89c5363f0ea", "efa2345d6e5ca9c7"),
    "2.5.0": ("4cf6a89c5363f0ea", "beab4f334e8b51f1"),
    "2.6.0 2.6.0.post1 2.7.0": ("14eaa9431dc4ef28", "beab4f334e8b51f1"),
    "2.8.0": ("5932e8280bf64434", "e7d5b4017b72f3b0"),
    "2.9.0": ("b1318b21e24aff69", "23ff60b32ddd02bd"),
    "2.10.0": ("819c3e138c4ed4c3", "23ff60b32ddd02bd", *_A2A),
    "2.11.0": ("0bb5d0085fd05561", "23ff60b32ddd02bd", *_A2A),
    "2.12.0": ("b0da8e107cd78eca", "23ff60b32ddd02bd", *_A2A),
    "2.13.0 2.14.0 2.14.1": ("0d0c2e20b1606219", "53c4fb5fb443133e", *_A2A),
    "2.15.0": ("12ad99ab70c90924", "4e03394ab53677b5", *_A2A),
    "2.16.0 2.16.1": ("f9d78935653b1587", "960d0185407ae8d1", *_A2A),
    "2.17.0 2.17.1": ("deefa1a9bcf8cdf2", "960d0185407ae8d1", *_A2A),
}
KNOWN = {
    release: prints for releases, prints in _FINGERPRINTS.items() for release in releases.split()
}
"""Fingerprints of each release in the order of `FUNCTIONS`. Release 2.10 added the last two."""


def patched_trees(version: str, sources: dict[str, str]) -> tuple[dict[str, ast.Module], str]:
    """Return the patched syntax tree of each module, and a text that lists the replacements.

    Args:
        version: version of the distribution. A build from source has a local part, as in
            ``2.8.0+4ea4e8b``, which is ignored.
        sources: source text of each module of ``MODULES``.

    Raises:
        Refused: the version needs no patch or is unknown, or the text of a function differs from
            that of the release.
    """
    release = version.partition("+")[0]
    numbers = release.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) >= FIXED_IN:
        raise Refused("it needs no patch, 2.18 and newer can be captured as they are")
    if release not in KNOWN:
        known = ", ".join(KNOWN)
        raise Refused(
            f"this release is not known ({known} are); take one of these or, better, 2.18 or newer"
        )
    trees, done = {module: ast.parse(source) for module, source in sources.items()}, []
    for (name, module), fingerprint in zip(FUNCTIONS.items(), KNOWN[release]):
        function = _definition(trees[module], name)
        actual = fingerprint_of(sources[module], function)
        if actual != fingerprint:
            raise Refused(
                f"{name} is not that of this release (fingerprint {actual}, known is {fingerprint})"
            )
        if name in STAND_INS:
            _return_at_once(function, STAND_INS[name])
            done.append(f"all in {name}")
        else:
            done.append(f"{_replace_calls(function)} in {name}")
    return trees, ", ".join(done)


def _definition(tree: ast.Module, qualified_name: str) -> ast.FunctionDef:
    body = tree.body
    for name in qualified_name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
        ]
        if len(found) != 1:
            raise Refused(
                f"its source has {len(found)} definitions of {qualified_name} instead of one"
            )
        body = found[0].body
    assert isinstance(found[0], ast.FunctionDef)
    return found[0]


def fingerprint_of(source: str, function: ast.FunctionDef) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a function's text, without white space.

    The text begins at ``def`` and contains comments. A syntax tree would not do, because it depends
    on the version of Python.
    """
    text = "".join("".join(source.split("\n")[function.lineno - 1 : function.end_lineno]).split())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _helper(name: str) -> ast.expr:
    return Attribute(Name("_te_thd_patch", Load()), name, Load())


def _return_at_once(function: ast.FunctionDef, stand_in: str) -> None:
    """Insert a call of the stand-in at the start of a function.

    The inserted line is ``if _te_thd_patch.active(): return _te_thd_patch.stand_in(...)``.
    """
    arguments: list[ast.expr] = [Name(argument.arg, Load()) for argument in function.args.args]
    statement = ast.If(
        Call(_helper("active"), [], []), [ast.Return(Call(_helper(stand_in), arguments, []))], []
    )
    where = 0 if ast.get_docstring(function) is None else 1
    function.body.insert(
        where, ast.fix_missing_locations(ast.copy_location(statement, function.body[where]))
    )


def _replace_calls(function: ast.FunctionDef) -> int:
    """Replace the calls of a function that wait for the GPU; return their number."""
    count = 0
    for node in ast.walk(function):
        match node:
            case Call(Attribute(Name("torch"), "equal"), [padded, real]):
                helper, args = "equal", [padded, real, Name("context_parallel", Load())]
            case Call(
                Attribute(Subscript(gradient, Slice(Subscript() as start, None)), "fill_"),
                [Constant(0)],
            ):
                helper, args = "zero_tail", [gradient, start, Constant(0)]
            case Call(
                Attribute(
                    Subscript(
                        gradient, Tuple([Slice(None, None), Slice(Subscript() as start, None)])
                    ),
                    "fill_",
                ),
                [Constant(0)],
            ):
                helper, args = "zero_tail", [gradient, start, Constant(1)]
            case _:
                continue
        node.func, node.args = _helper(helper), args
        ast.fix_missing_locations(node)
        count += 1
    return count
