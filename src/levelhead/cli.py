"""The entry point: run a command, turn what went wrong into one line and an exit code.

``--debug`` or LEVELHEAD_DEBUG=1 shows the traceback instead.
"""

import os
import sys
from collections.abc import Sequence

from levelhead.exits import BAD_INPUT, INTERRUPTED, explain

NO_ARGUMENTS = "NoArgsIsHelpError"  # of click or of typer's own copy: its message is the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; those of the process by default.

    Returns:
        The exit code.

    Raises:
        Exception: Whatever went wrong, when debugging.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from levelhead.commands import app
        from levelhead.options import Start

        start = Start(is_program=arguments is None)
        code = app(args=given, prog_name="levelhead", obj=start, standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == NO_ARGUMENTS:
            error.show()  # pyright: ignore[reportAttributeAccessIssue]
            return BAD_INPUT
        if "--debug" in given or os.environ.get("LEVELHEAD_DEBUG"):
            raise
        code, line = explain(error)
        print(f"levelhead: {line}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("levelhead: stopped", file=sys.stderr)
        return INTERRUPTED
    return code if isinstance(code, int) else 0
