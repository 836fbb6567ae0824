"""Made samples in the formats that recipes read."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

SENTENCE = "The quick brown fox jumps over the lazy dog and finds nothing there. "


def jpeg(seed=0, size=(40, 30), mode="RGB"):
    """Return the bytes of a random JPEG."""
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def image_folder(root, num_classes=2, per_class=3, parts=("train", "val")):
    """Write ``root/part/class/image.jpeg`` and return the root."""
    for part in parts:
        for label in range(num_classes):
            folder = root / part / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(per_class):
                (folder / f"{number}.jpeg").write_bytes(jpeg(10 * label + number))
    return root


def shard(path, count=4, label=lambda number: number % 2, first=0):
    """Write a webdataset shard of ``count`` samples."""
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + count):
            for ending, content in (
                ("jpg", jpeg(number)),
                ("cls", str(label(number)).encode()),
                ("json", json.dumps({"n": number}).encode()),
            ):
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def parquet(path, texts=None, count=20):
    """Write a parquet file with a column ``text``."""
    texts = [f"{number} {SENTENCE * 3}" for number in range(count)] if texts is None else texts
    pyarrow.parquet.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return path


def text_folder(root, count=20):
    """Write a data set folder as the hub has them."""
    root.mkdir(parents=True, exist_ok=True)
    parquet(root / "train-00000-of-00001.parquet", count=count)
    parquet(root / "validation-00000-of-00001.parquet", count=count // 2)
    return root


def tokenizer_folder(root):
    """Train a tokenizer of 300 tokens and save it as transformers does."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator(
        [SENTENCE], vocab_size=300, special_tokens=["<end>"], show_progress=False
    )
    PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<end>").save_pretrained(
        root
    )
    return root
