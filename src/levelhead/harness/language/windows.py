"""Windows of tokens: from a text that is known whole, or from a stream of documents."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.harness.language.tokenizer import Tokenizer
from levelhead.harness.order import order
from levelhead.harness.seeding import named_seed
from levelhead.shapes import require

SHUFFLE_BUFFER = 1000  # documents of a stream that wait to be drawn from
TOKENISED_AT_ONCE = 1000  # documents

Batch = tuple[Tensor, Tensor]


class Tokenise:
    """Turns a batch of documents into tokens; a class, so that ``datasets`` can name its result.

    Args:
        tokenizer: What turns texts into ids.
        column: Of the texts.
    """

    def __init__(self, tokenizer: Tokenizer, column: str):
        self.tokenizer, self.column = tokenizer, column

    def __call__(self, documents: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in documents[self.column]]
        return {"tokens": self.tokenizer(texts)}


def tokens_of(documents: Any, tokenizer: Tokenizer, column: str) -> Tensor:
    """Tokenise all documents, one after the other; ``datasets`` keeps the result on the disk.

    Args:
        documents: A ``datasets.Dataset``.
        tokenizer: What turns texts into ids.
        column: Of the texts.

    Returns:
        ``[N]`` int32.
    """
    import datasets

    features = datasets.Features({"tokens": datasets.List(datasets.Value("int32"))})
    tokenised = documents.map(
        Tokenise(tokenizer, column), batched=True, batch_size=TOKENISED_AT_ONCE,
        remove_columns=[column], features=features, desc="tokenising",
    )  # fmt: skip
    chunks = tokenised.data.column("tokens").chunks
    flat = [np.asarray(chunk.flatten(), dtype=np.int32) for chunk in chunks]
    return torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.int32))


def check_length(tokens: Tensor, length: int, where: str) -> None:
    """Refuse a text without a single window.

    Args:
        tokens: ``[N]``.
        length: Of a window.
        where: What to call the text.

    Raises:
        ValueError: It is empty or too short.
    """
    require(len(tokens) > 0, f"{where} must hold text", "none: every document is empty")
    require(
        len(tokens) > length,
        f"{where} must hold more than model.context_length={length} tokens",
        f"{len(tokens)}",
    )


class Windows:
    """A text that is known whole, cut into windows that do not overlap.

    Args:
        tokens: ``[N]``.
        length: Of a window; inputs and targets are shifted by one.
    """

    def __init__(self, tokens: Tensor, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def take(self, indices: Tensor) -> Batch:
        """Return some windows.

        Args:
            indices: Numbers of windows.

        Returns:
            Inputs and targets, ``[B, length]`` int64.
        """
        places = indices[:, None] * self.length + torch.arange(self.length + 1)
        windows = self.tokens[places].long()
        return windows[:, :-1], windows[:, 1:]

    def spread(self, count: int | None) -> Tensor:
        """Choose windows evenly.

        Args:
            count: How many at most; None for all.

        Returns:
            Their numbers.
        """
        wanted = min(len(self), count or len(self))
        return torch.linspace(0, len(self) - 1, wanted, dtype=torch.float64).long()

    def batches(self, batch_size: int, seed: int, start_step: int) -> Iterator[Batch]:
        """Yield batches for ever, all windows of an epoch in an order of its own.

        Args:
            batch_size: Windows of a step.
            seed: Of the run.
            start_step: First step, from 0.

        Yields:
            Inputs and targets.
        """
        for keys in order(len(self), batch_size, seed, start_step):
            yield self.take(torch.tensor([index for index, _ in keys]))


def stream_windows(
    documents: Any, tokenizer: Tokenizer, column: str, length: int
) -> Iterator[Tensor]:
    """Cut a stream of documents into windows.

    Args:
        documents: A ``datasets.IterableDataset``.
        tokenizer: What turns texts into ids.
        column: Of the texts.
        length: Of a window.

    Yields:
        ``[length + 1]`` int64; the last token of one is the first of the next.
    """
    waiting = torch.empty(0, dtype=torch.long)
    for group in documents.iter(batch_size=TOKENISED_AT_ONCE // 10):
        texts = [text or "" for text in group[column]]
        new = [torch.tensor(ids) for ids in tokenizer(texts)]
        waiting = torch.cat([waiting, *new])
        first = 0
        while first + length < len(waiting):
            yield waiting[first : first + length + 1]
            first += length
        waiting = waiting[first:]


def stream_batches(
    documents: Any, tokenizer: Tokenizer, column: str, length: int, batch_size: int, seed: int,
    start_step: int,
) -> Iterator[Batch]:  # fmt: skip
    """Yield batches of a stream for ever; to begin later reads what came before and drops it.

    Args:
        documents: A ``datasets.IterableDataset``.
        tokenizer: What turns texts into ids.
        column: Of the texts.
        length: Of a window.
        batch_size: Windows of a step.
        seed: Of the run; decides the order.
        start_step: First step, from 0.

    Yields:
        Inputs and targets, ``[batch_size, length]`` int64.

    Raises:
        ValueError: A whole pass over the stream gives no window.
    """
    shuffled = documents.shuffle(seed=named_seed(seed, "stream") >> 31, buffer_size=SHUFFLE_BUFFER)
    batch: list[Tensor] = []
    step = epoch = 0
    while True:
        shuffled.set_epoch(epoch)
        num_windows = 0
        for window in stream_windows(shuffled, tokenizer, column, length):
            num_windows += 1
            batch.append(window)
            if len(batch) == batch_size:
                if step >= start_step:
                    whole = torch.stack(batch)
                    yield whole[:, :-1], whole[:, 1:]
                batch, step = [], step + 1
        require(
            num_windows > 0,
            f"the stream must hold more than model.context_length={length} tokens",
            "a whole pass without a window",
        )
        epoch += 1
