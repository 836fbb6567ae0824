"""C files of the package, compiled for this machine when first needed, and loaded."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

_FLAGS = (
    "-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fopenmp-simd",
)  # fmt: skip
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": (
        "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    ),
}  # fmt: skip
"""By ``torch.backends.cpu.get_cpu_capability()``; of other processors nothing is gained."""
_SECONDS = 120


@functools.cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file, once for all processes, and load it.

    The compiler is that of the environment variable ``CC``, ``cc`` by default, none where it is
    empty. What it made stays in ``levelhead`` within the user's cache folder
    (``XDG_CACHE_HOME``, ``~/.cache`` by default) under a name that changes with the source.

    Args:
        source: The file. It may rely on AVX2 with fused multiply-add, or on AVX-512.

    Returns:
        The library. None off Linux, on another processor and without a compiler; also when the
        compiler or the loader fails, with a warning in their words.
    """
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if sys.platform != "linux" or instructions is None or not compiler:
        return None
    if shutil.which(compiler[0]) is None:
        return None
    command = [*compiler, *_FLAGS, *instructions, "-shared", "-fPIC", "-x", "c", str(source)]
    key = hashlib.sha256(source.read_bytes() + repr(command[:-1]).encode()).hexdigest()[:16]
    try:
        with contextlib.ExitStack() as stack:
            path = _folder(stack) / f"{source.stem}-{key}.so"
            if not path.exists():
                _compile(command, path)
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"levelhead could not compile {source.name}, and goes a slower way with the same "
            f"result: {words.strip()} (set CC to another compiler, or to nothing for none)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _folder(stack: contextlib.ExitStack) -> Path:
    """Return the cache folder, or one for this time only where that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "levelhead"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        folder = None
    if folder is not None and os.access(folder, os.W_OK | os.X_OK):
        return folder
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="levelhead-")))


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler; the library appears whole or not at all."""
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        subprocess.run(
            [*command, "-o", made, "-lm"],
            check=True, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
