"""C files of the package, compiled for this machine when first needed, and loaded."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

_FLAGS = (
    "-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fopenmp-simd", "-shared", "-fPIC", "-x", "c",
)  # fmt: skip
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": (
        "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    ),
}  # fmt: skip
"""By ``torch.backends.cpu.get_cpu_capability()``; of other processors nothing is gained."""
_SECONDS = 120
"""A compiler that takes longer hangs: a file takes a second or two."""


def find_compiler() -> list[str] | None:
    """Return the command that compiles for this machine; nothing is run.

    The compiler is that of the environment variable ``CC``, ``cc`` by default.

    Returns:
        None off Linux, on a processor without AVX2, without a compiler, and where the environment
        variable ``LEVELHEAD_COMPILE`` is 0.
    """
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())
    if sys.platform != "linux" or instructions is None:
        return None
    if os.environ.get("LEVELHEAD_COMPILE") == "0":
        return None
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
    except ValueError:  # a quote that does not end
        return None
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    return [*compiler, *instructions, *_FLAGS]


@functools.cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file, if that has not been done on this machine, and load it.

    What was compiled stays in ``levelhead`` within the user's cache folder (``XDG_CACHE_HOME``,
    ``~/.cache`` by default) under a name that changes with the source and the command.

    Args:
        source: The file. It may rely on AVX2 with fused multiply-add, or on AVX-512.

    Returns:
        The library. None without a compiler (see ``find_compiler``); also where the compiler or
        the loader fails, with a warning in their words.
    """
    command = find_compiler()
    if command is None:
        return None
    try:
        key = hashlib.sha256(source.read_bytes() + repr(command).encode()).hexdigest()[:16]
        with contextlib.ExitStack() as stack:
            path = _folder(stack) / f"{source.stem}-{key}.so"
            if not path.exists():
                _compile([*command, str(source)], path)
            return _load(path)
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"levelhead could not compile and load {source.name}, and goes a slower way to the "
            f"same result: {words.strip()} (CC names another compiler; LEVELHEAD_COMPILE=0 "
            "compiles nothing)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)  # damaged, or of another system: made anew next time
        raise


def _folder(stack: contextlib.ExitStack) -> Path:
    """Return the cache folder, or one for this time only where nobody else may write."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = root if root.is_absolute() else Path.home() / ".cache"
        folder = root / "levelhead"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_safe(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # not writable, or no home
        pass
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="levelhead-")))


def _is_safe(folder: Path) -> bool:
    """Whether only this user, or the system's, may put a library there to be loaded."""
    status = folder.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler; the library appears whole or not at all."""
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        subprocess.run(
            [*command, "-o", made, "-lm"],
            check=True, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
        )  # fmt: skip
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
