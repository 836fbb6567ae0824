"""How the command line is read: options of several values, and how a command was started."""

from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

LIST_OPTIONS = ("--variants", "--inits", "--data", "--recipe", "--learning-rates")


@dataclass(frozen=True)
class Start:
    """How a command was started.

    Attributes:
        is_program: As this process's own program, so that nothing has run in it before.
    """

    is_program: bool


class ListCommand(TyperCommand):
    """A command whose list options take several values: ``--variants quest gate`` as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_options(args, LIST_OPTIONS))


def repeat_options(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """Write ``--name a b`` as ``--name a --name b``.

    Args:
        arguments: Of a command line.
        names: Options that take several values.

    Returns:
        The same, as parsers of single values understand it.
    """
    spread: list[str] = []
    name = None
    for argument in arguments:
        if argument.startswith("--"):
            name = argument if argument in names else None
        elif name is not None and spread[-1] != name:
            spread.append(name)
        spread.append(argument)
    return spread


def split_list(texts: list[str] | None) -> tuple[str, ...]:
    """Split each text at its commas, but not inside parentheses.

    Args:
        texts: Values of a repeated option, or None.

    Returns:
        All the parts, stripped; empty ones left out.
    """
    parts: list[str] = []
    for text in texts or []:
        depth, part = 0, ""
        for letter in text:
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                parts.append(part)
                part = ""
            else:
                part += letter
        parts.append(part)
    return tuple(part.strip() for part in parts if part.strip())


def is_program(context: Any) -> bool:
    """Say whether a command is what this process was started for.

    Args:
        context: Of the command.
    """
    return isinstance(context.obj, Start) and context.obj.is_program
