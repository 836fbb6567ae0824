"""A training's state on the disk: whole or not there, checked before it is believed.

    checkpoints/step-00000120/
      model.safetensors optimizer.safetensors ...   tensors, a file for each group
      state.json                                    all the rest, plain values
      manifest.json                                 size and SHA-256 of the files above

A checkpoint is written beside its place, brought to the disk, and renamed. The one before it is
kept. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from levelhead.shapes import require

CHECKPOINTS = "checkpoints"
STATE, MANIFEST = "state.json", "manifest.json"
FORMAT = 1
"""Version of the manifest; a newer one is refused."""
NUM_KEPT = 2
STEP, DAMAGED = "step-", "damaged-"
BLOCK = 1 << 20  # bytes hashed at a time

Say = Callable[[str], object]
"""Told in words what a person should know."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        step: Steps done.
        tensors: Group to name to tensor, on the CPU.
        state: Plain values.
        path: Its folder.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


def write_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write a checkpoint in one stroke and drop all but the last two.

    Args:
        folder: Holds the checkpoints of one training; made when missing.
        step: Steps done.
        tensors: Group to name to tensor on the CPU.
        state: Plain values; NaN and infinity are allowed.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written; those that were there still are.
    """
    place = folder / f"{STEP}{step:08d}"
    beside = folder / f".{place.name}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{STEP}*"):  # by a process that was killed
        shutil.rmtree(left)
    try:
        beside.mkdir()
        for group, values in tensors.items():
            _save_tensors(beside / f"{group}.safetensors", values)
        _write(beside / STATE, json.dumps(state))
        names = sorted(path.name for path in beside.iterdir())
        files = {name: _described(beside / name) for name in names}
        manifest = {"format": FORMAT, "step": step, "files": files}
        _write(beside / MANIFEST, json.dumps(manifest, indent=1))
        sync(beside)
        if place.exists():
            _remove(place)
        beside.rename(place)
        sync(folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for old in checkpoints(folder)[NUM_KEPT:]:
        _remove(old)
    return place


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a training, the newest first, believed or not.

    Args:
        folder: Holds them; may be missing.

    Returns:
        Their folders.
    """
    return sorted((p for p in folder.glob(f"{STEP}*") if p.is_dir()), reverse=True)


def latest_checkpoint(folder: Path, say: Say) -> Checkpoint | None:
    """Read the newest checkpoint that is whole; set damaged ones aside and say so.

    Args:
        folder: Holds the checkpoints of one training.
        say: Told which one is damaged, how, and what is used instead.

    Returns:
        The checkpoint, or None where there never was one.

    Raises:
        ValueError: None of them is whole, or one is of a newer format.
    """
    for path in checkpoints(folder):
        problem = damage(path)
        if not problem:
            return read_checkpoint(path)
        aside = path.with_name(f"{DAMAGED}{path.name}")
        _remove(aside)
        path.rename(aside)
        say(f"{path} is damaged ({problem}) and was renamed to {aside.name}; "
            "the checkpoint before it is used")  # fmt: skip
    damaged = list(folder.glob(f"{DAMAGED}*"))
    require(
        not damaged,
        f"{folder} must hold a whole checkpoint",
        f"{len(damaged)} damaged ones",
        "another --out, to start anew",
    )
    return None


def damage(path: Path) -> str:
    """Compare a checkpoint with its manifest.

    Args:
        path: The checkpoint's folder.

    Returns:
        What is wrong, in a few words; empty when it is whole.

    Raises:
        ValueError: It is of a newer format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    newest = manifest.get("format")
    require(newest == FORMAT, f"{path} must be of format {FORMAT}", f"format={newest!r}",
            "the levelhead that wrote it")  # fmt: skip
    for name, written in files.items():
        if not (path / name).is_file():
            return f"no {name}"
        size = (path / name).stat().st_size
        if size != written["bytes"]:
            return f"{name} holds {size} of {written['bytes']} bytes"
        if _described(path / name) != written:
            return f"{name} has other bytes than were written"
    return ""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without checking it against its manifest.

    Args:
        path: The checkpoint's folder.

    Returns:
        All it holds.

    Raises:
        ValueError: Files that are not what they should be.
    """
    try:
        state = json.loads((path / STATE).read_text())
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    return Checkpoint(int(path.name.removeprefix(STEP)), tensors, state, path)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk.

    Args:
        path: Of either.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file(_apart(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    sync(path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights are written once more, as safetensors knows no sharing."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        is_shared = whole.untyped_storage().data_ptr() in seen
        apart[name] = whole.clone() if is_shared else whole
        seen.add(apart[name].untyped_storage().data_ptr())
    return apart


def _write(path: Path, content: str) -> None:
    path.write_text(content)
    sync(path)


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _remove(path: Path) -> None:
    """Take a folder out of sight before its files go, so that no half of it is ever seen."""
    if path.exists():
        hidden = path.with_name(f".{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
