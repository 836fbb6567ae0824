"""levelhead bench attention, as a script."""

from levelhead.bench.attention import main

if __name__ == "__main__":
    raise SystemExit(main())
