"""Names in transformers' own registry: attention function and mask function together."""

from collections.abc import Callable
from functools import partial
from typing import Any

from levelhead.parts.base import AttentionShape
from levelhead.shapes import require
from levelhead.sites.transformers_call import AnyShape, run_by_name, run_installed
from levelhead.variants import Variant, make_parts

PREFIX = "levelhead:"
LEAST_VERSION = "5.0"


def is_parameter_free(variant: Variant) -> bool:
    """Whether a variant needs nothing but queries, keys and values.

    Args:
        variant: Which.
    """
    if variant.has_projections or variant.needs_hidden_states:
        return False
    parameters = (next(part.parameters(), None) for part in _parts(variant).values())
    return all(parameter is None for parameter in parameters)


def _parts(variant: Variant) -> dict[str, Any]:
    return make_parts(variant, _NO_SHAPE)


_NO_SHAPE = AttentionShape(1, 1, 1, 1)
"""Parts without parameters do not ask for sizes."""


def register_name(name: str, attend: Callable[..., Any]) -> None:
    """Write an attention function and a mask function under one name.

    Args:
        name: What ``attn_implementation`` will accept.
        attend: The attention function.

    Raises:
        ImportError: transformers is missing, or too old to know mask functions.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"transformers {LEAST_VERSION} or newer is needed, which knows mask functions beside "
            "attention functions (a function without its mask loses the mask in silence): "
            "pip install 'levelhead[transformers]'"
        ) from error
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def name_of(variant: Variant, layers: tuple[int, ...] | None = None) -> str:
    """Return the implementation name of a converted model.

    Args:
        variant: What it runs.
        layers: Positions of the converted attentions where others were left alone.

    Returns:
        "levelhead:quest", or "levelhead:quest in layers 0, 2".
    """
    where = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
    return f"{PREFIX}{variant}{where}"


def register_variant(variant: Variant) -> str:
    """Make a parameter-free variant known by name.

    Args:
        variant: Which.

    Returns:
        The name.

    Raises:
        ValueError: The variant has parameters, reads hidden states or acts on projections.
    """
    require(
        is_parameter_free(variant),
        "a name alone can carry variants without parameters that need only queries, keys and "
        "values",
        f"variant={str(variant)!r}",
        "levelhead.convert(model, variant), which gives the parts a place",
    )
    shape, parts = _NO_SHAPE, _parts(variant)
    del parts["projections"]
    inner = AnyShape.from_parts(variant, shape, parts)
    register_name(name_of(variant), partial(run_by_name, inner))
    return name_of(variant)


def register_converted(variant: Variant, layers: tuple[int, ...] | None) -> str:
    """Make the name of a converted model known.

    Args:
        variant: What it runs.
        layers: As in ``name_of``.

    Returns:
        The name.
    """
    if layers is None and is_parameter_free(variant):
        return register_variant(variant)
    name = name_of(variant, layers)
    register_name(name, run_installed)
    return name
