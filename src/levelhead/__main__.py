"""``python -m levelhead``: the command line."""

import sys

from levelhead.cli import main

if __name__ == "__main__":
    sys.exit(main())
