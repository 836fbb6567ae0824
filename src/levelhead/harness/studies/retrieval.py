"""QUEST's retrieval task: which attention learns it, over a grid of learning rates and decays.

Every setting of the grid is a model of its own; all see the same samples and are trained side by
side, as one model whose parameters are stacked in each forward.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead.attention import Attention
from levelhead.harness.config import TrainingSettings
from levelhead.harness.models.blocks import MLP
from levelhead.harness.recipe import Recipe
from levelhead.harness.recipe_parts import RetrievalData, RetrievalModel
from levelhead.harness.recipe_training import training_settings
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Batch, Metric
from levelhead.shapes import require
from levelhead.steps import StepState

SHORTCUT_VARIANCE = 0.1
TEST_SEED = 0


class Retriever(nn.Module):
    """A linear map, one attention, one MLP, the mean over tokens: logits of the answer.

    Args:
        input_dim: Real part and answer part of a token together.
        model: Widths.
        num_classes: Of the answer.
        variant: The attention.
    """

    def __init__(self, input_dim: int, model: RetrievalModel, num_classes: int, variant: str):
        super().__init__()
        self.embed = nn.Linear(input_dim, model.embed_dim)
        self.attn = Attention(model.embed_dim, 1, variant=variant)
        self.mlp = MLP(model.embed_dim, model.mlp_dim)
        self.head = nn.Linear(model.embed_dim, num_classes)

    def forward(self, tokens: Float[Tensor, "B T I"]) -> Float[Tensor, "B K"]:
        hidden_states = self.embed(tokens)
        hidden_states = hidden_states + self.attn(hidden_states)
        hidden_states = hidden_states + self.mlp(hidden_states)
        return self.head(hidden_states.mean(1))


class Grid(nn.Module):
    """One model for each setting, called together on the same tokens.

    Args:
        models: Of equal shape.
    """

    def __init__(self, models: list[Retriever]):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, tokens: Float[Tensor, "B T I"]) -> Float[Tensor, "R B K"]:
        """Return the logits of every model.

        Args:
            tokens: ``[B, T, I]``.

        Returns:
            ``[R, B, K]``.
        """
        plain: Any = self.models[0]
        named = [dict(model.named_parameters()) for model in self.models]
        stacked = {name: torch.stack([own[name] for own in named]) for name in named[0]}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU cannot be stacked
            return vmap(lambda own: functional_call(plain, own, (tokens,)))(stacked)


class Retrieval:
    """The retrieval task over all settings of a recipe's grid.

    The loss is the sum over settings, so that each is trained as if alone.

    Args:
        recipe: With ``data.kind: retrieval``.
    """

    metric: ClassVar[Metric] = Metric("solved_pct", "solved %", "points", True, 1)

    def __init__(self, recipe: Recipe):
        assert isinstance(recipe.data, RetrievalData)
        assert isinstance(recipe.model, RetrievalModel)
        self.recipe, self.data, self.model = recipe, recipe.data, recipe.model
        require(
            recipe.training.weight_decay == 0 and recipe.training.clip_norm is None,
            "data.weight_decays sets the decay of each setting, and clipping would tie them",
            f"training.weight_decay={recipe.training.weight_decay}, "
            f"training.clip_norm={recipe.training.clip_norm}",
            "0 and null",
        )
        self.settings: TrainingSettings = training_settings(recipe, None)

    @cached_property
    def grid(self) -> list[tuple[float, float]]:
        """Learning rate and weight decay of each setting."""
        return list(product(self.data.learning_rates, self.data.weight_decays))

    def build(self, variant: str) -> nn.Module:
        sizes = self.data.real_dim + self.data.num_classes, self.model, self.data.num_classes
        models = [Retriever(*sizes, variant) for _ in self.grid]
        require(
            not any(isinstance(module, StepState) for module in models[0].modules()),
            "the retrieval task stacks its models, which a variant with a running state forbids",
            variant,
            "a variant without running state",
        )
        return Grid(models)

    def start(self, variant: str, seed: int) -> nn.Module:
        """Start all settings of a seed from the same weights."""
        with torch.random.fork_rng(devices=[]):
            grid = self.build(variant)
            assert isinstance(grid, Grid)
            for model in grid.models:
                for name, module in model.named_modules():
                    torch.manual_seed(named_seed(seed, name))
                    reset: Any = getattr(module, "reset_parameters", None)
                    if reset is not None and not isinstance(module, Attention):
                        reset()
        return grid

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        step = start_step
        while True:
            generator = torch.Generator().manual_seed(named_seed(seed, f"step {step}"))
            has_shortcut = torch.rand(self.settings.batch_size, generator=generator) < 0.5
            yield self.draw(has_shortcut, generator)
            step += 1

    @cached_property
    def shift(self) -> Float[Tensor, " D"]:
        """Mean of the shortcut.

        One direction for all seeds: every other law is isotropic, and the seed draws the weights.
        """
        ones = torch.ones(self.data.real_dim)
        return self.data.shift_norm * ones / ones.norm()

    def draw(
        self, has_shortcut: Tensor, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B T I"], Int[Tensor, " B"]]:
        """Draw samples.

        Args:
            has_shortcut: ``[B]`` bool, whose answer token comes from the shifted law.
            generator: Source of the draws.

        Returns:
            Tokens and the class of the answer.
        """
        data, size = self.data, len(has_shortcut)
        shape = size, data.num_tokens, data.real_dim
        real = torch.randn(shape, generator=generator)
        classes = torch.randint(data.num_classes, shape[:2], generator=generator)
        where = torch.randint(data.num_tokens, (size,), generator=generator)
        rows = torch.arange(size)
        noise = real[rows, where]
        shifted = self.shift + SHORTCUT_VARIANCE**0.5 * noise
        real[rows, where] = torch.where(has_shortcut[:, None], shifted, data.variance**0.5 * noise)
        tokens = torch.cat([real, F.one_hot(classes, data.num_classes).to(real)], dim=-1)
        return tokens, classes[rows, where]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, answers = batch
        logits = model(tokens)
        many = answers.expand(len(logits), -1)
        losses = F.cross_entropy(logits.transpose(1, 2), many, reduction="none").mean(1)
        return torch.where(losses.isfinite(), losses, 0).sum()  # a setting may diverge alone

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the share of settings that solve the task with and without the shortcut."""
        model.eval()
        worst = torch.stack([self._accuracies(model, shortcut) for shortcut in (0, 1)]).amin(0)
        solved = worst >= self.data.solved_at
        return {
            "solved_pct": 100 * solved.double().mean().item(),
            "accuracy_mean_pct": 100 * worst.mean().item(),
            "accuracy_best_pct": 100 * worst.max().item(),
        }

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        grid: Any = model
        return [
            {"params": list(own.parameters()), "weight_decay": decay,
             "lr_scale": rate / self.recipe.training.learning_rate}
            for own, (rate, decay) in zip(grid.models, self.grid, strict=True)
        ]  # fmt: skip

    def _accuracies(self, model: nn.Module, shortcut: int) -> Float[Tensor, " R"]:
        generator = torch.Generator().manual_seed(named_seed(TEST_SEED, f"shortcut {shortcut}"))
        has_shortcut = torch.full((self.data.num_test,), bool(shortcut))
        tokens, answers = self.draw(has_shortcut, generator)
        device = next(model.parameters()).device
        predicted = model(tokens.to(device)).argmax(-1).cpu()
        return (predicted == answers).double().mean(1)
