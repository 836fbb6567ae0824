"""Make variants known to transformers by name."""

from levelhead.sites.transformers_names import register_variant
from levelhead.variants import Variant, parse_variant


def register(variant: str | Variant) -> str:
    """Let ``attn_implementation="levelhead:<variant>"`` name a variant without parameters.

    Writes the attention function and the mask function into transformers' registries, under one
    name. A variant with parameters, or one that acts on projections, needs a place in the model:
    ``levelhead.convert``.

    Args:
        variant: Terms joined by ``+``; see ``levelhead.variants()``.

    Returns:
        The name, for ``from_pretrained(..., attn_implementation=name)`` or
        ``model.set_attn_implementation(name)``.

    Raises:
        ValueError: An illegal variant, or one that a name alone cannot carry.
        ImportError: transformers is missing, or too old to know mask functions.

    Example:
        >>> import levelhead as lh
        >>> lh.register("quest")
        'levelhead:quest'
    """
    return register_variant(parse_variant(variant))
