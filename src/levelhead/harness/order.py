"""The order of the data: a function of the seed and the step alone."""

from collections.abc import Iterator

import torch

from levelhead.harness.seeding import named_seed
from levelhead.shapes import require

Key = tuple[int, int]
"""Index of a sample, and the seed of what is done to it."""


def order(
    num_samples: int, batch_size: int, seed: int, start_step: int = 0, repeats: int = 1
) -> Iterator[list[Key]]:
    """Yield the samples of each step for ever, epoch after epoch, each in an order of its own.

    Args:
        num_samples: Of the source.
        batch_size: Of a step; what is left at the end of an epoch is dropped.
        seed: Of the run.
        start_step: First step, from 0.
        repeats: Copies of a sample that follow each other; an epoch stays as long.

    Yields:
        ``batch_size`` keys.

    Raises:
        ValueError: A batch larger than an epoch.
    """
    require(
        batch_size <= num_samples,
        "training.batch_size must be at most the samples of an epoch",
        f"batch_size={batch_size}, {num_samples} samples",
    )
    per_epoch = num_samples // batch_size
    step = start_step
    while True:
        epoch, first = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(named_seed(seed, f"epoch {epoch}"))
        permuted = torch.randperm(num_samples, generator=generator)
        if repeats > 1:
            permuted = permuted.repeat_interleave(repeats)[:num_samples]
        for chosen in permuted.split(batch_size)[first:per_epoch]:
            base = named_seed(seed, f"step {step}") >> 1  # room for the places to be added
            yield [(index, base + place) for place, index in enumerate(chosen.tolist())]
            step += 1
