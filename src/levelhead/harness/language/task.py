"""Causal language modelling as a task: any model, text and tokenizer that a recipe names."""

import math
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import levelhead.harness.data as builtin
from levelhead.harness.config import TrainingSettings
from levelhead.harness.language.documents import open_documents
from levelhead.harness.language.tokenizer import Bytes, Tokenizer, load_tokenizer
from levelhead.harness.language.windows import (
    Windows,
    check_length,
    stream_batches,
    stream_windows,
    tokens_of,
)
from levelhead.harness.parameter_groups import decayed_apart
from levelhead.harness.recipe import Recipe
from levelhead.harness.recipe_models import (
    build_own,
    build_transformers,
    gpt_config,
    put_variant,
    start_foreign,
    start_own,
)
from levelhead.harness.recipe_parts import BuiltinText, GPTModel, TransformersModel
from levelhead.harness.recipe_training import training_settings
from levelhead.harness.studies.theta import theta_by_layer
from levelhead.harness.tasks import Batch, Metric
from levelhead.shapes import require


class RecipeText:
    """Windows of tokens, a model of transformers or levelhead's GPT.

    Args:
        recipe: With text.
    """

    metric: ClassVar[Metric] = Metric("perplexity", "perplexity", "perplexity", False, 3)

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.data: Any = recipe.data
        self.length: int = recipe.model.context_length  # pyright: ignore
        self.settings: TrainingSettings = training_settings(recipe, None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What turns texts into ids.

        Raises:
            ValueError: It has more tokens than the model.
        """
        tokenizer = Bytes() if self._is_builtin else load_tokenizer(self.data.tokenizer)
        vocab_size = self.recipe.model.vocab_size  # pyright: ignore
        require(
            tokenizer.vocab_size <= vocab_size,
            "model.vocab_size must hold every token",
            f"vocab_size={vocab_size}, {tokenizer.vocab_size} tokens of {tokenizer.name}",
        )
        return tokenizer

    @cached_property
    def train_windows(self) -> Windows:
        """The training text, where it is known whole."""
        return self._windows(is_training=True)

    @cached_property
    def test_windows(self) -> Windows:
        """The test text, or of a stream as much as is evaluated."""
        if not self._is_stream:
            return self._windows(is_training=False)
        stream = stream_windows(
            open_documents(self.data, is_training=False), self.tokenizer, self.data.text_column,
            self.length,
        )  # fmt: skip
        taken = list(islice(stream, self.recipe.evaluation.max_samples))
        tokens = torch.cat([w[:-1] for w in taken] + [w[-1:] for w in taken[-1:]] or [Tensor()])
        return self._checked(tokens, "test")

    def build(self, variant: str) -> nn.Module:
        if isinstance(self.recipe.model, GPTModel):
            return build_own(gpt_config(self.recipe.model), variant)
        return put_variant(self._build_foreign(), variant)

    def start(self, variant: str, seed: int) -> nn.Module:
        if isinstance(self.recipe.model, GPTModel):
            return start_own(gpt_config(self.recipe.model), variant, seed)
        return start_foreign(self._build_foreign, variant, seed)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        size = self.settings.batch_size
        if not self._is_stream:
            return self.train_windows.batches(size, seed, start_step)
        return stream_batches(
            open_documents(self.data, is_training=True), self.tokenizer, self.data.text_column,
            self.length, size, seed, start_step,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        logits = _logits(model, tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        evaluation, windows = self.recipe.evaluation, self.test_windows
        device = next(model.parameters()).device
        chosen = windows.spread(evaluation.max_samples)
        total = 0.0
        for part in chosen.split(evaluation.batch_size):
            tokens, following = (t.to(device) for t in windows.take(part))
            total += len(part) * self.loss(model, (tokens, following)).item()
        loss = total / len(chosen)
        found = {"perplexity": math.exp(min(loss, 700.0)), "loss_nats": loss}
        if isinstance(self.tokenizer, Bytes):
            found["bits_per_byte"] = loss / math.log(2)
        if evaluation.theta_rows:
            tokens = windows.take(windows.spread(4))[0].to(device)
            run = partial(_logits, model, tokens)
            found |= theta_by_layer(model, run, len(tokens), evaluation.theta_rows)
        return found

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return decayed_apart(model, self.settings.weight_decay)

    @property
    def _is_builtin(self) -> bool:
        return isinstance(self.data, BuiltinText)

    @property
    def _is_stream(self) -> bool:
        return getattr(self.data, "streaming", False)

    def _build_foreign(self) -> nn.Module:
        assert isinstance(self.recipe.model, TransformersModel)
        return build_transformers(self.recipe.model)

    def _windows(self, is_training: bool) -> Windows:
        part = "training" if is_training else "test"
        if self._is_builtin:
            return self._checked(self._builtin_bytes(is_training), part)
        documents = open_documents(self.data, is_training)
        return self._checked(tokens_of(documents, self.tokenizer, self.data.text_column), part)

    def _builtin_bytes(self, is_training: bool) -> Tensor:
        loaded = builtin.load(self.data.name)
        require(
            isinstance(loaded, builtin.TextData),
            "data.kind=builtin_text needs a text",
            f"data.name={self.data.name}, images",
            "topics, shakespeare, a text file",
        )
        assert isinstance(loaded, builtin.TextData)
        assert self.tokenizer.name == "bytes"
        return loaded.train_bytes if is_training else loaded.test_bytes

    def _checked(self, tokens: Tensor, part: str) -> Windows:
        check_length(tokens, self.length, f"the {part} part of {self.settings.data}")
        return Windows(tokens, self.length)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return getattr(output, "logits", output)
