"""A recipe becomes a task."""

from levelhead.harness.config import Training, TrainingSettings
from levelhead.harness.language.task import RecipeText
from levelhead.harness.recipe import IMAGES, TEXTS, Recipe
from levelhead.harness.studies.retrieval import Retrieval
from levelhead.harness.tasks import Task, make_task
from levelhead.harness.vision.task import RecipeImages


def make_recipe_task(recipe: Recipe) -> Task:
    """Return the task that a recipe describes; data are opened when they are first needed.

    Args:
        recipe: In either form.

    Returns:
        The task.

    Raises:
        ValueError: A training that does not fit its data.
    """
    if isinstance(recipe.data, IMAGES):
        return RecipeImages(recipe)
    return RecipeText(recipe) if isinstance(recipe.data, TEXTS) else Retrieval(recipe)


def task_of(settings: Training) -> Task:
    """Make a task again from the settings that a run's folder holds.

    Args:
        settings: Of a recipe or of a comparison.

    Returns:
        The task.
    """
    if isinstance(settings, TrainingSettings):
        return make_recipe_task(Recipe.from_resolved(settings.recipe))
    return make_task(settings)
