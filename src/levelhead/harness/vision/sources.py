"""Where images come from: a source has a length and reads one image and its label at a time.

Nothing is downloaded. What is missing is named with the command that puts it there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

import levelhead.harness.data as builtin
from levelhead.harness.recipe_parts import (
    BuiltinImages,
    ImageFolder,
    Shards,
    TorchvisionData,
)
from levelhead.harness.vision.shards import ShardIndex, index_shards
from levelhead.shapes import require

MAX_LOST_FRAC = 0.01

Data = ImageFolder | Shards | TorchvisionData | BuiltinImages


class Source(Protocol):
    """Labelled images."""

    name: str
    in_memory: bool
    losses: tuple[str, ...]
    num_lost: int

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label; a broken image raises what Pillow raises."""
        ...

    def where(self, index: int) -> str:
        """Return what to call a sample in a message."""
        ...


class ArraySource:
    """Images that lie in memory, grey or RGB bytes."""

    in_memory, losses, num_lost = True, (), 0

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray):
        self.name, self.images, self.labels = name, images, labels

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def where(self, index: int) -> str:
        return f"{self.name}, image {index}"


class TorchvisionSource:
    """A data set of torchvision, or several of its parts one after the other."""

    in_memory, losses, num_lost = False, (), 0

    def __init__(self, name: str, parts: list[Any]):
        self.name, self.parts = name, parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, index: int) -> tuple[Image.Image, int]:
        for part in self.parts:
            if index < len(part):
                image, label = part[index]
                return image, int(label)
            index -= len(part)
        raise IndexError(index)

    def where(self, index: int) -> str:
        return f"{self.name}, image {index}"


class FolderSource(TorchvisionSource):
    """Images in folders, each with a path to name it by."""

    def where(self, index: int) -> str:
        return self.parts[0].samples[index][0]


class ShardSource:
    """webdataset shards."""

    in_memory = False

    def __init__(self, pattern: str, index: ShardIndex):
        self.name, self.samples = pattern, index.samples
        self.losses, self.num_lost = index.losses, index.num_lost

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        sample = self.samples[index]
        return Image.open(sample.read()), sample.label

    def where(self, index: int) -> str:
        return f"{self.samples[index].path}, {self.samples[index].key}"


def open_source(data: Data, is_training: bool) -> Source:
    """Open the training or the test part of some images.

    Args:
        data: What the recipe says.
        is_training: Which part.

    Returns:
        The source.

    Raises:
        FileNotFoundError: It is not there; the message says what to put where, and how.
        ValueError: Another number of images than the recipe states, or too many lost.
    """
    source = _OPENERS[type(data)](data, is_training)
    require(len(source) > 0, f"{source.name} must hold images", "none")
    lost_frac = source.num_lost / (len(source) + source.num_lost)
    require(
        lost_frac <= MAX_LOST_FRAC,
        f"at most {MAX_LOST_FRAC:.0%} of the samples may be lost in damaged shards",
        f"about {lost_frac:.1%}: {'; '.join(source.losses[:3])}",
    )
    if is_training:
        _check_number(source, stated_sizes(data)[0])
    return source


def _check_number(source: Source, stated: int | None) -> None:
    found, lost = len(source), source.num_lost
    slack = MAX_LOST_FRAC * (stated or 0) if lost else 0
    require(
        stated is None or abs(found - stated) <= slack,
        f"{source.name} must hold the data.num_train={stated} training images of its recipe",
        f"{found}" + (f", and about {lost} lost" if lost else ""),
        f"the whole data set, or data.num_train={found}",
    )


def stated_sizes(data: Data) -> tuple[int | None, int | None]:
    """Return how many training images and classes a recipe counts on, opening nothing.

    Args:
        data: What the recipe says.

    Returns:
        The two numbers; None for a folder of IDX files, which must be opened to know.
    """
    if isinstance(data, BuiltinImages):
        return BUILTIN_SIZES.get(data.name, (None, None))
    if isinstance(data, TorchvisionData):
        return TORCHVISION[data.name].num_train, TORCHVISION[data.name].num_classes
    return data.num_train, data.num_classes


BUILTIN_SIZES = {"digits": (1297, 10), "fashion_mnist": (60_000, 10)}
"""Training images and classes."""


def _builtin(data: BuiltinImages, is_training: bool) -> ArraySource:
    loaded = builtin.load(data.name)
    require(
        isinstance(loaded, builtin.ImageData),
        "data.kind=builtin_images needs images",
        f"data.name={data.name}, a text",
        "digits, fashion_mnist, a folder with IDX files",
    )
    assert isinstance(loaded, builtin.ImageData)
    low, high = loaded.train_images.min(), loaded.train_images.max()
    part = loaded.train_images if is_training else loaded.test_images
    labels = loaded.train_labels if is_training else loaded.test_labels
    grey = ((part[:, 0] - low) / (high - low) * 255).round().clamp(0, 255).byte()
    return ArraySource(data.name, grey.numpy(), labels.numpy())


IMAGENET_ARCHIVES = (
    "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz"
)


def _folder(data: ImageFolder, is_training: bool) -> FolderSource:
    from torchvision.datasets import ImageFolder as Folder

    path = Path(data.path) / (data.train if is_training else data.test)
    if not path.is_dir():
        raise FileNotFoundError(
            f"no folder {path}: it must hold one folder of images for each class. For "
            f"ImageNet-1k put {IMAGENET_ARCHIVES} from image-net.org into {data.path} and run "
            f"python -c \"from torchvision.datasets import ImageNet as I; I('{data.path}', "
            f"'train'); I('{data.path}', 'val')\"; or give data.path=FOLDER"
        )
    folder = Folder(str(path))
    require(
        len(folder.classes) == data.num_classes,
        f"{path} must hold data.num_classes={data.num_classes} folders, one for each class",
        f"{len(folder.classes)}",
    )
    return FolderSource(str(path), [folder])


def _shards(data: Shards, is_training: bool) -> ShardSource:
    pattern = data.train if is_training else data.test
    return ShardSource(pattern, index_shards(pattern))


class TorchvisionSet:
    """How torchvision calls a data set and its parts."""

    def __init__(self, name: str, num_train: int, num_classes: int, splits: dict[bool, list[Any]]):
        self.name, self.num_train, self.num_classes = name, num_train, num_classes
        self.splits = splits

    def open(self, path: str, is_training: bool) -> list[Any]:
        """Open the parts that lie in a folder.

        Args:
            path: The folder.
            is_training: Which part.

        Returns:
            Data sets of torchvision.

        Raises:
            FileNotFoundError: They are not all there.
        """
        import torchvision.datasets

        make: Callable[..., Any] = getattr(torchvision.datasets, self.name)
        try:
            return [make(path, split, download=False) for split in self.splits[is_training]]
        except (RuntimeError, FileNotFoundError) as error:
            calls = "; ".join(
                f"D('{path}', {split!r}, download=True)"
                for split in [*self.splits[True], *self.splits[False]]
            )
            raise FileNotFoundError(
                f"no whole {self.name} in {path} ({' '.join(str(error).split())}); put it there "
                f'with python -c "from torchvision.datasets import {self.name} as D; {calls}", '
                "or give data.path=FOLDER"
            ) from error


TORCHVISION = {
    "cifar10": TorchvisionSet("CIFAR10", 50_000, 10, {True: [True], False: [False]}),
    "cifar100": TorchvisionSet("CIFAR100", 50_000, 100, {True: [True], False: [False]}),
    "oxford_pets": TorchvisionSet(
        "OxfordIIITPet", 3680, 37, {True: ["trainval"], False: ["test"]}
    ),
    "flowers102": TorchvisionSet(
        "Flowers102", 2040, 102, {True: ["train", "val"], False: ["test"]}
    ),
    "food101": TorchvisionSet("Food101", 75_750, 101, {True: ["train"], False: ["test"]}),
}
"""A split by its name in torchvision, or whether it is the training part."""


def _torchvision(data: TorchvisionData, is_training: bool) -> TorchvisionSource:
    parts = TORCHVISION[data.name].open(data.path, is_training)
    return TorchvisionSource(f"{data.name} in {data.path}", parts)


_OPENERS: dict[type, Callable[[Any, bool], Source]] = {
    BuiltinImages: _builtin,
    ImageFolder: _folder,
    Shards: _shards,
    TorchvisionData: _torchvision,
}
