"""Run with ``python benchmarks/measure.py --help``."""

import sys

from levelhead.bench.measure import main

if __name__ == "__main__":
    sys.exit(main())
