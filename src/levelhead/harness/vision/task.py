"""Image classification as a task: any model, source and augmentation that a recipe names."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levelhead.harness.config import TrainingSettings, default_workers
from levelhead.harness.order import order
from levelhead.harness.parameter_groups import decayed_apart
from levelhead.harness.recipe import Recipe
from levelhead.harness.recipe_models import (
    build_own,
    build_timm,
    put_variant,
    start_foreign,
    start_own,
    vit_config,
)
from levelhead.harness.recipe_parts import TimmModel, ViTModel
from levelhead.harness.recipe_training import training_settings
from levelhead.harness.tasks import Batch, Metric
from levelhead.harness.vision.samples import Broken, Collate, Samples, loader
from levelhead.harness.vision.sources import Data, Source, open_source, stated_sizes
from levelhead.harness.vision.transforms import make_transform
from levelhead.shapes import require


class RecipeImages:
    """Labelled images, a model of timm or levelhead's ViT.

    Args:
        recipe: With ``augmentation``.

    Raises:
        ValueError: A training that does not fit the images.
    """

    metric: ClassVar[Metric] = Metric("accuracy_pct", "accuracy %", "points", True, 2)

    def __init__(self, recipe: Recipe):
        assert recipe.augmentation is not None
        self.recipe, self.augmentation = recipe, recipe.augmentation
        self.data: Data = recipe.data  # pyright: ignore[reportAttributeAccessIssue]
        plan = recipe.training
        require(
            plan.batch_size % 2 == 0 or not (self.augmentation.mixup or self.augmentation.cutmix),
            "training.batch_size must be even for mixup and CutMix",
            f"batch_size={plan.batch_size}",
        )
        stated = stated_sizes(self.data)[0]
        num_train = len(self.source) if stated is None else stated
        self.settings: TrainingSettings = training_settings(recipe, num_train)

    @cached_property
    def source(self) -> Source:
        """The training images; opened when first asked for."""
        return open_source(self.data, is_training=True)

    @cached_property
    def test_source(self) -> Source:
        """The test images; opened when first asked for."""
        return open_source(self.data, is_training=False)

    @cached_property
    def num_classes(self) -> int:
        """Classes that the recipe states, or that the training labels show."""
        stated = stated_sizes(self.data)[1]
        return stated or max(self.source.read(i)[1] for i in range(len(self.source))) + 1

    @cached_property
    def broken(self) -> Broken:
        """Training images that could not be read so far."""
        return Broken(self.source)

    def build(self, variant: str) -> nn.Module:
        if isinstance(self.recipe.model, ViTModel):
            return build_own(self._config(), variant)
        return put_variant(self._build_timm(), variant)

    def start(self, variant: str, seed: int) -> nn.Module:
        if isinstance(self.recipe.model, ViTModel):
            return start_own(self._config(), variant, seed)
        weights = self._timm().weights
        return start_foreign(self._build_timm, variant, seed, weights)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        samples = self._samples(self.source, is_training=True)
        keys = order(
            len(self.source), self.settings.batch_size, seed, start_step, self.augmentation.repeats
        )
        collate = Collate(self.augmentation, self.num_classes)
        for images, targets, broken in loader(samples, keys, collate, self._num_workers):
            self.broken.add(broken)
            yield images, targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, targets = batch
        is_mixed = targets.is_floating_point()  # then it is smoothed as well
        smoothing = 0.0 if is_mixed else self.augmentation.label_smoothing
        return F.cross_entropy(model(images).float(), targets, label_smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        device = next(model.parameters()).device
        broken, sums = Broken(self.test_source), torch.zeros(3, dtype=torch.float64)
        samples = self._samples(self.test_source, is_training=False)
        collate = Collate(None, self.num_classes)
        for images, labels, skipped in loader(samples, self._test_keys(), collate, 0):
            broken.add(skipped)
            if len(labels):
                logits = model(images.to(device)).float().cpu()
                sums += _sums(logits, labels)
        found = {"accuracy_pct": 100 * sums[0] / sums[2], "loss_nats": sums[1] / sums[2]}
        skipped = len(broken.indices)
        return {k: v.item() for k, v in found.items()} | (
            {"images_skipped": float(skipped)} if skipped else {}
        )

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        plan = self.recipe.training
        if not isinstance(self.recipe.model, TimmModel):
            return decayed_apart(model, plan.weight_decay)
        from timm.optim._param_groups import (
            param_groups_layer_decay,
            param_groups_weight_decay,
        )

        plain: Any = model
        undecayed = plain.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        if plan.layer_decay is None:
            return param_groups_weight_decay(
                model, plan.weight_decay, no_weight_decay_list=undecayed
            )
        return param_groups_layer_decay(
            model, plan.weight_decay, undecayed, layer_decay=plan.layer_decay
        )

    @property
    def _num_workers(self) -> int:
        wanted = self.data.num_workers
        return default_workers(wanted) if wanted else 0  # never more than there are cores

    def _timm(self) -> TimmModel:
        assert isinstance(self.recipe.model, TimmModel)
        return self.recipe.model

    def _build_timm(self) -> nn.Module:
        return build_timm(self._timm(), self.num_classes, self.augmentation.num_channels)

    def _config(self):
        assert isinstance(self.recipe.model, ViTModel)
        return vit_config(self.recipe.model, self.augmentation, self.num_classes)

    def _samples(self, source: Source, is_training: bool) -> Samples:
        is_fixed = not (is_training and self.augmentation.random_crop)
        return Samples(
            source,
            make_transform(self.augmentation, is_training),
            {1: "L", 3: "RGB"}[self.augmentation.num_channels],
            self.num_classes,
            keep=is_fixed and source.in_memory,
            replace=is_training,
        )

    def _test_keys(self) -> list[list[tuple[int, int]]]:
        evaluation, count = self.recipe.evaluation, len(self.test_source)
        wanted = min(count, evaluation.max_samples or count)
        indices = torch.linspace(0, count - 1, wanted).long().unique()
        return [[(i, 0) for i in part.tolist()] for part in indices.split(evaluation.batch_size)]


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    correct = (logits.argmax(-1) == labels).double().sum()
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    return torch.stack([correct, loss, torch.tensor(len(labels)).double()])
