"""levelhead bench models, as a script."""

from levelhead.bench.models import main

if __name__ == "__main__":
    raise SystemExit(main())
