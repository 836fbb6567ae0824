"""What benchmarks are told on the command line, checked before anything is measured."""

import argparse
import os
from pathlib import Path

import torch


def positive(text: str) -> int:
    """Read a size or a number of rounds.

    Args:
        text: As typed.

    Returns:
        The number, at least 1.

    Raises:
        argparse.ArgumentTypeError: It is not one.
    """
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Read a size that may be 0.

    Args:
        text: As typed.

    Returns:
        The number, at least 0.

    Raises:
        argparse.ArgumentTypeError: It is not one.
    """
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return number


def out_file(text: str) -> Path:
    """Read where a record is to be kept: a measurement of an hour must not end without it.

    Args:
        text: As typed.

    Returns:
        The file, in a folder that can be written.

    Raises:
        argparse.ArgumentTypeError: It is a folder, or its folder is missing or may not be written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"must lie in a folder that exists and can be written, got {text!r}"
        )
    return path


def device(text: str) -> str:
    """Read the device to measure on.

    Args:
        text: As typed.

    Returns:
        The same.

    Raises:
        argparse.ArgumentTypeError: It is not "cpu", or "cuda" on a machine that has it.
    """
    known = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if text not in known:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(known)} here, got {text!r}")
    return text
