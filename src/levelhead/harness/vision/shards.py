"""webdataset tar shards, read with the standard library: an index once, then any sample.

A sample is an image file and a ``.cls`` file of the same key (the name up to its first dot).
What cannot be read in the middle of a shard is passed over, up to the next whole file; how much
was lost is counted.
"""

import io
import math
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from levelhead.harness.vision.shard_names import shard_paths
from levelhead.shapes import require

IMAGE_ENDS = ("jpg", "jpeg", "png", "ppm", "webp", "bmp")
LABEL_END = "cls"
BLOCK = tarfile.BLOCKSIZE
MAX_LABEL_BYTES = 32


@dataclass(frozen=True)
class ShardSample:
    """Where one sample lies.

    Attributes:
        path: The shard.
        key: Its name in the shard.
        offset: First byte of the image file.
        size: Bytes of the image file.
        label: As the ``.cls`` file says.
    """

    path: str
    key: str
    offset: int
    size: int
    label: int

    def read(self) -> io.BytesIO:
        """Return the bytes of the image file."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


@dataclass(frozen=True)
class ShardIndex:
    """All samples of some shards.

    Attributes:
        samples: In the order of the shards.
        losses: For each damaged shard, in words, what was lost.
        num_lost: Samples lost: those without image or label, and a guess from the lost bytes.
    """

    samples: tuple[ShardSample, ...]
    losses: tuple[str, ...]
    num_lost: int


def index_shards(pattern: str) -> ShardIndex:
    """Find the samples of all shards without reading their images.

    Args:
        pattern: Of paths, as ``shard_paths`` reads it.

    Returns:
        The index.

    Raises:
        FileNotFoundError: No file matches, or one that is named is missing.
        ValueError: No sample in any shard.
    """
    paths = shard_paths(pattern)
    samples: list[ShardSample] = []
    losses: list[str] = []
    num_lost = 0
    for path in paths:
        found, lost_here, words = _index(path)
        samples += found
        num_lost += lost_here
        losses += [words] if words else []
    require(
        len(samples) > 0,
        f"the shards {pattern} must hold samples: an image and a .{LABEL_END} file each",
        f"none in {len(paths)} files" + "".join(f"; {words}" for words in losses[:1]),
    )
    return ShardIndex(tuple(samples), tuple(losses), num_lost)


def _index(path: str) -> tuple[list[ShardSample], int, str]:
    size = Path(path).stat().st_size
    whole: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, int] = {}
    end = lost_bytes = 0
    with tarfile.open(path, "r:", ignore_zeros=True) if size else _empty() as tar:
        for member in _members(tar):
            lost_bytes += member.offset - end
            end = min(size, member.offset_data + _padded(member.size))
            if member.offset_data + member.size > size:
                lost_bytes += size - member.offset
                break
            if member.isfile():
                key, _, ending = member.name.rpartition("/")[2].partition(".")
                key = member.name[: len(member.name) - len(ending)].rstrip(".")
                whole.setdefault(key, {})[ending.lower()] = member
                if ending.lower() == LABEL_END:
                    labels[key] = _label(path, tar, member)
    lost_bytes += _lost_at_end(path, end, size)
    samples = [s for key, files in whole.items() if (s := _sample(path, key, files, labels))]
    mean_size = max(1, end - lost_bytes) / max(1, len(samples))
    num_lost = len(whole) - len(samples) + math.ceil(lost_bytes / mean_size)
    words = f"{path}: about {num_lost} samples lost, {lost_bytes:,} of {size:,} bytes unreadable"
    return samples, num_lost, words if num_lost else ""


def _empty() -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(bytes(2 * BLOCK)), mode="r:", ignore_zeros=True)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while True:
        try:
            member = tar.next()
        except (tarfile.TarError, ValueError, OverflowError):  # a damaged extended header
            return
        if member is None:
            return
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # no second list
        yield member


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _label(path: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    file = tar.extractfile(member)
    raw = file.read(MAX_LABEL_BYTES) if file else b""
    try:
        return int(raw)
    except ValueError:
        raise ValueError(
            f"{path}: {member.name} must hold a label as digits, got {raw[:20]!r}"
        ) from None


def _sample(
    path: str, key: str, files: dict[str, tarfile.TarInfo], labels: dict[str, int]
) -> ShardSample | None:
    image = next((files[ending] for ending in IMAGE_ENDS if ending in files), None)
    if image is None or key not in labels:
        return None
    return ShardSample(path, key, image.offset_data, image.size, labels[key])


def _lost_at_end(path: str, end: int, size: int) -> int:
    """Count the bytes behind the last file if they are not the zeros that end an archive."""
    with open(path, "rb") as file:
        file.seek(end)
        rest = file.read()
    return size - end if rest.strip(b"\0") else 0
