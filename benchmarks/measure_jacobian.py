"""Run with ``python benchmarks/measure_jacobian.py --help``."""

import sys

from levelhead.bench.measure_jacobian import main

if __name__ == "__main__":
    sys.exit(main())
