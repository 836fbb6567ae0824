"""How this library keeps attention: ``levelhead.Attention``."""

from typing import Any

from torch import nn

from levelhead.attention import Attention
from levelhead.sites.layout import Layout, linear
from levelhead.sites.sites import AttentionSite


def read_own(name: str, module: nn.Module, model: nn.Module) -> AttentionSite | None:
    """Describe a ``levelhead.Attention``.

    Whether the future is masked is decided by each call, so ``is_causal`` stays False.

    Args:
        name: Dotted path in the model.
        module: Any module of it.
        model: The model.

    Returns:
        The site, or None for any other module.
    """
    if not isinstance(module, Attention):
        return None
    stock: Any = module._modules["inner"]
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    return AttentionSite(
        name=name,
        module=module,
        layout=Layout(*(linear(projection) for projection in projections)),
        num_heads=module.num_heads,
        scale=stock.norm.score_scale(stock.scale),
        kind="self" if module.shape.kv_dim("k") == module.embed_dim else "cross",
        has_rope=module.rope is not None,
        dropout_p=stock.dropout_p,
    )
