"""The little language of names: ``quest + gate(granularity='headwise')``."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_FORM = "name, or name(key=value, ...), joined by +"
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Term:
    """One name with its options.

    Attributes:
        name: What is meant.
        options: Keyword options; constants only.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __str__(self) -> str:
        if not self.options:
            return self.name
        inside = ", ".join(f"{key}={value!r}" for key, value in sorted(self.options.items()))
        return f"{self.name}({inside})"

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self):
        return Term, (self.name, dict(self.options))


def parse_terms(text: str) -> tuple[Term, ...]:
    """Read a string of terms.

    Args:
        text: ``term (+ term)*`` with ``term = name | name(key=value, ...)``; a value is a Python
            constant (number, string, True, False, None; lower case too) or a tuple of them.

    Returns:
        The terms in the order written; ``" + ".join(map(str, terms))`` reads back as the same.

    Raises:
        ValueError: The string does not have that form, or names one term twice.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(_complaint(text)) from error
    nodes = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        nodes.append(tree.right)
        tree = tree.left
    terms = tuple(_term(node, text) for node in [tree, *reversed(nodes)])
    names = [term.name for term in terms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"each term may stand once, got {', '.join(twice)} twice in {text!r}")
    return terms


def _term(node: ast.expr, text: str) -> Term:
    match node:
        case ast.Name(name):
            return Term(name)
        case ast.Call(ast.Name(name), [], keywords) if all(k.arg for k in keywords):
            return Term(name, {str(k.arg): _constant(k.value, text) for k in keywords})
    raise ValueError(_complaint(text))


def _constant(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(_complaint(text)) from error


def _complaint(text: str) -> str:
    written = re.sub(r"\s+", " ", str(text))
    return f"a variant or initializer is written as {_FORM}, got {written!r:.200}"
