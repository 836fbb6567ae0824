"""Which shards a pattern names: braces as webdataset writes them, then wildcards."""

import itertools
import re
from glob import glob, has_magic
from pathlib import Path

RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
BRACES = re.compile(r"\{([^{}]*)\}")


def expand_braces(pattern: str) -> list[str]:
    """Write out the braces of a pattern, as a shell does.

    Args:
        pattern: ``{00000..00127}`` counts, with the leading zeros of its ends and an optional
            ``..STEP``; ``{a,b}`` chooses. Both may stand several times and in one another. Braces
            around anything else stay as they are.

    Returns:
        One name for each way to choose, the last braces changing fastest.

    Example:
        >>> expand_braces("{train,val}-{08..10}.tar")[:3]
        ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    for braces in BRACES.finditer(pattern):  # innermost ones
        choices = _choices(braces[1])
        if choices is not None:
            head, tail = pattern[: braces.start()], pattern[braces.end() :]
            whole = [expand_braces(f"{head}{choice}{tail}") for choice in choices]
            return list(dict.fromkeys(itertools.chain(*whole)))
    return [pattern]


def _choices(inside: str) -> list[str] | None:
    counted = RANGE.fullmatch(inside)
    if counted is None:
        return inside.split(",") if "," in inside else None
    first, last = int(counted[1]), int(counted[2])
    is_padded = any(len(end) > 1 and end.startswith("0") for end in counted.group(1, 2))
    width = max(len(counted[1]), len(counted[2])) if is_padded else 0
    step = int(counted[3] or 1) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]


def shard_paths(pattern: str) -> list[str]:
    """Find the shards of a pattern.

    Args:
        pattern: A path with braces as of ``expand_braces`` and ``*``, ``?`` and ``[...]``.

    Returns:
        Paths, sorted; each once.

    Raises:
        FileNotFoundError: No file matches, or one that the braces name is missing.
    """
    names = [pattern] if Path(pattern).is_file() else expand_braces(pattern)
    found = {name: glob(name) if has_magic(name) else _existing(name) for name in names}
    paths = sorted(set(itertools.chain(*found.values())))
    if not paths:
        raise FileNotFoundError(
            f"no shard matches {pattern}: put webdataset .tar files there, in which each sample "
            "has an image (.jpg, .png, ...) and its label (.cls) under one key"
        )
    missing = [name for name, matching in found.items() if not matching]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(names)} shards that {pattern} names are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    return paths


def _existing(name: str) -> list[str]:
    return [name] if Path(name).is_file() else []
