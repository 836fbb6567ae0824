"""From a source to batches: what a batch holds depends on the seed and its step alone.

Each sample has a random source of its own, so worker processes change nothing.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from levelhead.harness.order import Key
from levelhead.harness.recipe_parts import Augmentation
from levelhead.harness.vision.sources import MAX_LOST_FRAC, Source
from levelhead.shapes import require

_LOG = logging.getLogger(__name__)
NUMPY_SEEDS = 2**32


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU source for a moment, and put them back.

    Args:
        seed: Any number that torch takes.

    Yields:
        Nothing.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs as well
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Samples(Dataset):
    """Reads, checks and transforms one sample.

    Args:
        source: Where images come from.
        transform: From an image to a tensor.
        mode: Pillow's, ``"L"`` or ``"RGB"``.
        num_classes: Labels must be below it.
        keep: Whether to keep what was transformed: right where nothing is random.
        replace: Whether the next image stands in for a broken one.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[Image.Image], Tensor],
        mode: str,
        num_classes: int,
        *,
        keep: bool,
        replace: bool,
    ):
        self.source, self.transform, self.mode = source, transform, mode
        self.num_classes, self.replace = num_classes, replace
        self.kept: dict[int, tuple[Tensor, int]] | None = {} if keep else None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[tuple[Tensor, int] | None, list[int], int]:
        index, seed = key
        broken: list[int] = []
        sample = self._read(index, seed, broken)
        while sample is None and self.replace and len(broken) <= MAX_LOST_FRAC * len(self):
            index = (index + 1) % len(self)
            sample = self._read(index, seed, broken)
        return sample, broken, seed

    def _read(self, index: int, seed: int, broken: list[int]) -> tuple[Tensor, int] | None:
        if self.kept is not None and index in self.kept:
            return self.kept[index]
        try:
            image, label = self.source.read(index)
            image = image.convert(self.mode)
        except (SyntaxError, Image.DecompressionBombError):  # Pillow's, of a damaged file
            broken.append(index)
            return None
        except OSError as error:
            if error.errno is not None:  # the system's, not Pillow's
                raise
            broken.append(index)
            return None
        require(
            0 <= label < self.num_classes,
            f"labels must be 0 .. {self.num_classes - 1}",
            f"{label} ({self.source.where(index)})",
        )
        with seeded(seed):
            sample = self.transform(image), label
        if self.kept is not None:
            self.kept[index] = sample
        return sample


class Collate:
    """Stacks samples, and mixes them where the recipe says so.

    Args:
        augmentation: What the recipe says.
        num_classes: Width of mixed targets.
    """

    def __init__(self, augmentation: Augmentation | None, num_classes: int):
        self.mix: Callable[..., Any] | None = None
        if augmentation is not None and (augmentation.mixup or augmentation.cutmix):
            from timm.data.mixup import Mixup

            self.mix = Mixup(
                mixup_alpha=augmentation.mixup,
                cutmix_alpha=augmentation.cutmix,
                label_smoothing=augmentation.label_smoothing,
                num_classes=num_classes,
            )

    def __call__(self, read: list[Any]) -> tuple[Tensor, Tensor, list[int]]:
        whole = [sample for sample, _, _ in read if sample is not None]
        broken = [index for _, indices, _ in read for index in indices]
        if not whole:
            return torch.empty(0), torch.empty(0, dtype=torch.long), broken
        images = torch.stack([image for image, _ in whole])
        labels = torch.tensor([label for _, label in whole])
        if self.mix is not None and len(whole) == len(read):
            with seeded(read[0][2]):
                images, labels = self.mix(images, labels)
        return images, labels, broken


class Broken:
    """Counts the images of a source that could not be read; too many are refused.

    Args:
        source: Where they come from.
    """

    def __init__(self, source: Source):
        self.source, self.indices = source, set()

    def add(self, indices: list[int]) -> None:
        """Count some, each once.

        Args:
            indices: In the source.

        Raises:
            ValueError: More than 1 % of all images are broken.
        """
        for index in indices:
            if index not in self.indices:
                self.indices.add(index)
                _LOG.warning("skipped a broken image: %s", self.source.where(index))
        require(
            len(self.indices) <= MAX_LOST_FRAC * len(self.source),
            f"at most {MAX_LOST_FRAC:.0%} of the images of {self.source.name} may be broken",
            f"{len(self.indices)} of {len(self.source)}, the last one "
            f"{self.source.where(indices[-1]) if indices else ''}",
        )


def loader(
    samples: Samples, keys: Any, collate: Collate, num_workers: int
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield batches of keys as tensors.

    Args:
        samples: Reads one key.
        keys: Yields lists of keys.
        collate: Makes a batch of samples.
        num_workers: Processes that read ahead; 0: none.

    Returns:
        An iterator over images, targets, and the indices of images that were skipped.
    """
    generator = torch.Generator().manual_seed(0)  # else the loader draws from the global source
    return iter(
        DataLoader(
            samples, batch_sampler=keys, collate_fn=collate, num_workers=num_workers,
            generator=generator,
        )
    )  # fmt: skip
