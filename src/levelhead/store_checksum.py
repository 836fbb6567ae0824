"""One number for the values of a model."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes, in the order of the names.

    Args:
        tensors: For example ``model.state_dict()``.

    Returns:
        64 hexadecimal digits; equal exactly when every tensor is equal bit by bit.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
