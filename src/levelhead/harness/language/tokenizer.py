"""Text to token ids: bytes, or a tokenizer of transformers that lies on this machine."""

from typing import Any, Protocol

NEWLINE = 10  # what ends a document of bytes


class Tokenizer(Protocol):
    """Turns documents into ids, each with the mark of its end."""

    name: str
    vocab_size: int

    def __call__(self, texts: list[str]) -> list[list[int]]: ...


class Bytes:
    """The bytes of UTF-8; a document ends with a newline."""

    name, vocab_size = "bytes", 256

    def __call__(self, texts: list[str]) -> list[list[int]]:
        return [[*text.encode(), NEWLINE] for text in texts if text.strip()]


class Pretrained:
    """A tokenizer of transformers; a document ends with its end-of-text token.

    Args:
        name: A folder, or a name whose files were downloaded before.

    Raises:
        FileNotFoundError: It is not on this machine.
    """

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self.name = name
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"no tokenizer {name} on this machine; put it there with "
                f'python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{name}')\", or give data.tokenizer=FOLDER or "
                "data.tokenizer=bytes"
            ) from error
        self.vocab_size = len(self.inner)
        end = self.inner.eos_token_id
        self.end: list[int] = [] if end is None else [end]

    def __call__(self, texts: list[str]) -> list[list[int]]:
        kept = [text for text in texts if text.strip()]
        if not kept:
            return []
        ids = self.inner(kept, add_special_tokens=False, verbose=False)["input_ids"]
        return [[*own, *self.end] for own in ids]


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: ``bytes``, or as ``AutoTokenizer.from_pretrained`` takes it; nothing is downloaded
            and no code of a tokenizer is run.

    Returns:
        The tokenizer.
    """
    return Bytes() if name == "bytes" else Pretrained(name)
