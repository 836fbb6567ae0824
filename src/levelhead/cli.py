"""The entry point: run a command, turn what went wrong into one line and an exit code.

``--debug`` or LEVELHEAD_DEBUG=1 shows the traceback instead.
"""

import os
import sys
from collections.abc import Sequence

from levelhead.exits import INTERRUPTED, explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; those of the process by default.

    Returns:
        The exit code, where the command did not exit by itself.

    Raises:
        Exception: Whatever went wrong, when debugging.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from levelhead.commands import Start, app

        app(args=given, prog_name="levelhead", obj=Start(is_program=arguments is None))
    except Exception as error:
        if "--debug" in given or os.environ.get("LEVELHEAD_DEBUG"):
            raise
        code, line = explain(error)
        print(f"levelhead: {line}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("levelhead: stopped", file=sys.stderr)
        return INTERRUPTED
    return 0
