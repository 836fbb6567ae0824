"""The small models are what transformers and torch mean by the same names."""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ViTForImageClassification,
)
from transformers import ViTConfig as HFViTConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from levelhead.attention import Attention
from levelhead.harness.models.blocks import INIT_STD, PostNormBlock, PreNormBlock
from levelhead.harness.models.cache import GrowingCache
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.harness.models.positions import POSITIONS, WAVELENGTH_BASE, make_positions
from levelhead.harness.models.vit import ViT, ViTConfig
from levelhead.harness.seeding import paired_init_

SMALL_GPT = {"vocab_size": 31, "context_length": 11, "embed_dim": 12, "num_heads": 2}
SMALL_VIT = {"image_size": 6, "patch_size": 2, "num_classes": 7, "embed_dim": 12, "num_heads": 3}


def randomise_(model: nn.Module) -> nn.Module:
    """Leave no parameter at a special value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().double()


def copy_linear(ours: nn.Linear, weight, bias) -> None:
    ours.weight.data.copy_(weight)
    ours.bias.data.copy_(bias)


def copy_norm(ours: nn.LayerNorm, theirs: nn.LayerNorm) -> None:
    ours.load_state_dict(theirs.state_dict())
    ours.eps = theirs.eps


def test_gpt_equals_gpt2_of_transformers():
    config = GPT2Config(
        vocab_size=31, n_positions=11, n_embd=12, n_layer=3, n_head=2, activation_function="gelu"
    )
    theirs = randomise_(GPT2LMHeadModel(config))
    ours = GPT(GPTConfig(**SMALL_GPT, num_layers=3, positions="learned")).eval().double()
    ours.token_embed.weight.data.copy_(theirs.transformer.wte.weight)
    ours.positions.table.data.copy_(theirs.transformer.wpe.weight)
    copy_norm(ours.norm, theirs.transformer.ln_f)
    for block, other in zip(ours.blocks, theirs.transformer.h, strict=True):
        copy_norm(block.attn_norm, other.ln_1)
        copy_norm(block.mlp_norm, other.ln_2)
        weights, biases = other.attn.c_attn.weight.split(12, 1), other.attn.c_attn.bias.split(12)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            copy_linear(getattr(block.attn, f"{name}_proj"), weight.T, bias)
        copy_linear(block.attn.o_proj, other.attn.c_proj.weight.T, other.attn.c_proj.bias)
        copy_linear(block.mlp[0], other.mlp.c_fc.weight.T, other.mlp.c_fc.bias)
        copy_linear(block.mlp[2], other.mlp.c_proj.weight.T, other.mlp.c_proj.bias)
    tokens = torch.randint(31, (3, 11))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_vit_equals_vit_of_transformers():
    config = HFViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24,
        image_size=6, patch_size=2, num_channels=1, num_labels=7,
    )  # fmt: skip
    theirs = randomise_(ViTForImageClassification(config))
    state = theirs.state_dict()
    ours = ViT(ViTConfig(**SMALL_VIT, pooling="cls")).eval().double()
    ours.cls_token.data.copy_(theirs.vit.embeddings.cls_token)
    ours.positions.table.data.copy_(theirs.vit.embeddings.position_embeddings[0])
    ours.patch_embed.load_state_dict(
        theirs.vit.embeddings.patch_embeddings.projection.state_dict()
    )
    ours.head.load_state_dict(theirs.classifier.state_dict())
    copy_norm(ours.norm, theirs.vit.layernorm)
    for number, block in enumerate(ours.blocks):
        norms = sorted(key for key in state if f".{number}.layernorm_" in key)
        renamed = {"after": block.mlp_norm, "before": block.attn_norm}
        for key in norms:
            part = renamed["after" if "after" in key else "before"]
            getattr(part, key.rsplit(".", 1)[1]).data.copy_(state[key])
            part.eps = config.layer_norm_eps
        linears = [
            (name, module)
            for name, module in theirs.named_modules()
            if isinstance(module, nn.Linear) and f".{number}." in name
        ]
        order = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj, block.attn.o_proj,
                 block.mlp[0], block.mlp[2]]  # fmt: skip
        assert len(linears) == len(order), [name for name, _ in linears]
        for mine, (_, other) in zip(order, linears, strict=True):
            copy_linear(mine, other.weight, other.bias)
    images = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_equals_the_encoder_layer_of_torch(norm_first):
    theirs = nn.TransformerEncoderLayer(
        12, 3, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    randomise_(theirs)
    block_type = PreNormBlock if norm_first else PostNormBlock
    ours = block_type(Attention(12, 3, qkv_bias=True), 12, 2.0, 0.0).eval().double()
    weights, biases = theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias
    for name, weight, bias in zip("qkv", weights.chunk(3), biases.chunk(3), strict=True):
        copy_linear(getattr(ours.attn, f"{name}_proj"), weight, bias)
    ours.attn.o_proj.load_state_dict(theirs.self_attn.out_proj.state_dict())
    ours.mlp[0].load_state_dict(theirs.linear1.state_dict())
    ours.mlp[2].load_state_dict(theirs.linear2.state_dict())
    copy_norm(ours.attn_norm, theirs.norm1)
    copy_norm(ours.mlp_norm, theirs.norm2)
    hidden_states = torch.randn(2, 5, 12, dtype=torch.float64)
    # Training mode keeps torch off its own fast path; there is no dropout to differ by.
    expected = theirs.train()(hidden_states)
    torch.testing.assert_close(ours(hidden_states), expected, rtol=1e-10, atol=1e-10)


def test_rotary_positions_equal_those_of_llama():
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, max_position_embeddings=17,
        rope_parameters={"rope_type": "default", "rope_theta": WAVELENGTH_BASE},
    )  # fmt: skip
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = LlamaRotaryEmbedding(config)(query, torch.arange(4, 9)[None])
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    rotation = make_positions("rope", 17, 24, 3).rotation(4, 5)
    assert rotation is not None
    torch.testing.assert_close(rotation(query, key), expected, rtol=1e-5, atol=1e-6)


def test_sinusoidal_positions_follow_the_formula():
    table = make_positions("sinusoidal", 7, 6, 2)(torch.zeros(1, 7, 6, dtype=torch.float64))[0]
    for t in range(7):
        for i in range(3):
            angle = torch.tensor(t / 10_000 ** (2 * i / 6), dtype=torch.float64)
            assert table[t, 2 * i].item() == pytest.approx(angle.sin().item(), abs=1e-6)
            assert table[t, 2 * i + 1].item() == pytest.approx(angle.cos().item(), abs=1e-6)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_sees_order_and_never_the_future(positions, norm):
    model = randomise_(GPT(GPTConfig(**SMALL_GPT, positions=positions, norm=norm)))
    tokens = torch.stack([torch.randperm(31)[:11] for _ in range(2)])
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    logits = model(tokens)
    torch.testing.assert_close(model(changed)[:, :7], logits[:, :7], rtol=0, atol=1e-12)
    assert (model(changed)[:, 7:] - logits[:, 7:]).abs().max() > 1e-3
    swapped = tokens[:, [1, 0, *range(2, 11)]]
    assert (model(swapped)[:, -1] - logits[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_with_a_cache_equals_gpt_without(positions):
    config = GPTConfig(**SMALL_GPT, positions=positions, num_kv_heads=1, variant="quest + affine")
    model = randomise_(GPT(config))
    tokens = torch.randint(31, (2, 11))
    caches = [GrowingCache() for _ in model.blocks]
    parts = [model(part, caches) for part in tokens.split([4, 1, 5, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-10, atol=1e-10)


def test_generate_takes_the_likeliest_token_or_draws():
    model = randomise_(GPT(GPTConfig(**SMALL_GPT)))
    text = torch.randint(31, (2, 3))
    expected = text
    for _ in range(6):
        likeliest = model(expected)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, likeliest], dim=1)
    assert torch.equal(model.generate(text, 6), expected)
    draw = lambda seed: model.generate(text, 6, torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_mean_pooling_without_positions_is_blind_to_the_order_of_patches():
    model = randomise_(ViT(ViTConfig(**SMALL_VIT, pooling="mean")))
    images = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    flipped = torch.cat([images[..., 2:4, :], images[..., :2, :], images[..., 4:, :]], dim=-2)
    assert (model(images) - model(flipped)).abs().max() > 1e-6
    model.positions.table.data.zero_()
    torch.testing.assert_close(model(images), model(flipped), rtol=1e-10, atol=1e-10)


def test_gpt_starts_as_gpt2_does():
    model = GPT(GPTConfig(embed_dim=128, num_layers=8, positions="learned"))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            residual = name.endswith(("o_proj.weight", "mlp.2.weight"))
            std = INIT_STD / (2 * 8) ** 0.5 if residual else INIT_STD
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_vit_starts_as_timms_does():
    model = ViT(ViTConfig(embed_dim=128, num_heads=4, pooling="cls", image_size=32))
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert (parameter == 1).all()
        elif name.endswith("bias") and "patch_embed" not in name:
            assert (parameter == 0).all()
        elif name.endswith("weight") and "patch_embed" not in name:
            assert parameter.std().item() == pytest.approx(INIT_STD, rel=0.06), name
    assert model.cls_token.abs().max() < 1e-5
    assert model.positions.table.std().item() == pytest.approx(INIT_STD, rel=0.06)


@pytest.mark.parametrize("variant", ["softmax", "affine + gate", "spectral(form='svd')"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_models_are_built_on_the_meta_device_and_started_later(positions, variant):
    config = GPTConfig(**SMALL_GPT, positions=positions, variant=variant)
    with torch.device("meta"):
        late = GPT(config)
    early = GPT(config)
    late.to_empty(device="cpu")
    late.head.weight = late.token_embed.weight
    for model in (early, late):
        paired_init_(model, 5)
    tokens = torch.randint(31, (2, 11))
    assert torch.equal(early.eval()(tokens), late.eval()(tokens))


def test_heads_are_tied_only_on_request():
    tied, free = (GPT(GPTConfig(**SMALL_GPT, tied_head=tied)) for tied in (True, False))
    assert tied.head.weight is tied.token_embed.weight
    assert free.head.weight is not free.token_embed.weight
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, free)]
    assert counts[1] - counts[0] == 31 * 12


@pytest.mark.parametrize("variant", ["affine", "sigma_reparam", "spectral(form='svd') + gate"])
def test_models_train_with_variants_that_keep_state(variant):
    vit = ViT(ViTConfig(**SMALL_VIT, variant=variant)).train()
    gpt = GPT(GPTConfig(**SMALL_GPT, variant=variant)).train()
    vit(torch.randn(2, 1, 6, 6)).square().sum().backward()
    gpt(torch.randint(31, (2, 5))).square().sum().backward()
    for model in (vit, gpt):
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert not missing


def test_wrong_sizes_are_refused_in_words():
    with pytest.raises(ValueError, match=r"images must be \[B, 1, 6, 6\], got \[2, 1, 8, 8\]"):
        ViT(ViTConfig(**SMALL_VIT))(torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="tokens must fit context_length=11, got 12 tokens"):
        GPT(GPTConfig(**SMALL_GPT))(torch.zeros(1, 12, dtype=torch.long))
    with pytest.raises(ValueError, match="patch_size must divide image_size, got patch_size=3"):
        ViTConfig(image_size=8, patch_size=3)
    with pytest.raises(ValueError, match="unknown positions 'rope'; known: learned, sinusoidal"):
        ViTConfig(positions="rope")
    with pytest.raises(ValueError, match="unknown norm placement 'sandwich'; known: pre, post"):
        GPT(GPTConfig(**SMALL_GPT, norm="sandwich"))
    with pytest.raises(ValueError, match="unknown pooling 'max'; known: cls, mean"):
        ViTConfig(pooling="max")
    with pytest.raises(ValueError, match="rotary positions need an even head_dim"):
        GPT(GPTConfig(embed_dim=9, num_heads=3))
