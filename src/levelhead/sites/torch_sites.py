"""How torch itself keeps attention: ``nn.MultiheadAttention`` and the layers around it."""

from torch import nn

from levelhead.sites.layout import Layout, Projection, Rows, Stored, linear, span, whole
from levelhead.sites.reading import parent_of, refuse
from levelhead.sites.sites import AttentionSite


def read_torch(name: str, module: nn.Module, model: nn.Module) -> AttentionSite | None:
    """Describe an ``nn.MultiheadAttention``.

    Whether the future is masked is decided by each call, so ``is_causal`` stays False.

    Args:
        name: Dotted path in the model.
        module: Any module of it.
        model: The model.

    Returns:
        The site, or None for any other module.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        refuse(name, module, "add_bias_kv and add_zero_attn add a key that is no token")
    q, k, v = _projections(module)
    parent = parent_of(name, model)
    is_cross = (
        isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module
    ) or module.kdim != module.embed_dim
    return AttentionSite(
        name=name,
        module=module,
        layout=Layout(q, k, v, linear(module.out_proj)),
        num_heads=module.num_heads,
        scale=module.head_dim**-0.5,
        kind="cross" if is_cross else "self",
        dropout_p=module.dropout,
    )


def _projections(module: nn.MultiheadAttention) -> list[Projection]:
    width = module.embed_dim
    parts = [span(i * width, width) for i in range(3)]
    biases = [
        None if module.in_proj_bias is None else Stored(module, "in_proj_bias", part)
        for part in parts
    ]
    if module.in_proj_weight is not None:
        places: list[tuple[str, Rows]] = [("in_proj_weight", part) for part in parts]
    else:
        places = [(f"{letter}_proj_weight", whole) for letter in "qkv"]
    return [
        Projection(Stored(module, weight, rows), bias)
        for (weight, rows), bias in zip(places, biases, strict=True)
    ]
