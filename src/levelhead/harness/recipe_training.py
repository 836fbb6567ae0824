"""From a recipe's training plan to the numbers that an engine reads."""

from levelhead.harness.config import TrainingSettings
from levelhead.harness.recipe import Recipe
from levelhead.harness.recipe_parts import DatasetsText
from levelhead.shapes import require

SAME_NAME = ("batch_size", "micro_batch_size", "min_learning_rate", "schedule", "decay_steps",
             "weight_decay", "betas", "eps", "clip_norm", "ema_decay", "mixed_precision",
             "evaluate_every")  # fmt: skip


def training_settings(recipe: Recipe, num_train: int | None) -> TrainingSettings:
    """Turn epochs into steps and a rate per so many samples into a rate.

    Args:
        recipe: The recipe.
        num_train: Samples of an epoch; None where the plan counts steps.

    Returns:
        All that an engine reads.

    Raises:
        ValueError: A batch larger than an epoch, or warm-up and decay longer than the training.
    """
    plan = recipe.training
    if num_train is not None:
        require(
            plan.batch_size <= num_train,
            "training.batch_size must be at most the training samples",
            f"batch_size={plan.batch_size}, {num_train} samples",
        )
    per_epoch = (num_train or 0) // plan.batch_size
    steps = plan.steps or max(1, round((plan.epochs or 0) * per_epoch))
    warmup = plan.warmup_steps or round((plan.warmup_epochs or 0) * per_epoch)
    require(
        warmup + plan.decay_steps <= steps,
        "warm-up and decay_steps must fit into the training",
        f"{warmup} + {plan.decay_steps} of {steps} steps",
    )
    scale = plan.batch_size / (plan.learning_rate_batch or plan.batch_size)
    return TrainingSettings(
        name=recipe.name,
        model=model_word(recipe),
        data=data_word(recipe),
        steps=steps,
        learning_rate=plan.learning_rate * scale,
        warmup_steps=warmup,
        recipe=recipe.resolved(),
        **{name: getattr(plan, name) for name in SAME_NAME},
    )


def model_word(recipe: Recipe) -> str:
    """Say what is trained.

    Args:
        recipe: The recipe.

    Returns:
        A word.
    """
    model = recipe.model
    return getattr(model, "name", None) or getattr(model, "family", None) or model.kind


def data_word(recipe: Recipe) -> str:
    """Say what it is trained on.

    Args:
        recipe: The recipe.

    Returns:
        A word: a name, a folder or a pattern of files.
    """
    data = recipe.data
    if isinstance(data, DatasetsText):
        return data.path
    for field in ("name", "path", "train"):
        if getattr(data, field, None):
            return str(getattr(data, field))
    return data.kind
