"""A recipe: one experiment of a paper as plain, checked values, in full size or small.

A recipe is data. It cannot run code, name a Python object, or reach outside its folder.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, model_validator

from levelhead.harness.recipe_files import (
    apply_overrides,
    form_of,
    parse_override,
    read_recipe,
    recipe_name,
)
from levelhead.harness.recipe_parts import (
    Augmentation,
    BuiltinImages,
    BuiltinText,
    Data,
    DatasetsText,
    Evaluation,
    GPTModel,
    ImageFolder,
    Model,
    Part,
    RetrievalData,
    RetrievalModel,
    Shards,
    TextFiles,
    TimmModel,
    TorchvisionData,
    TrainingPlan,
    TransformersModel,
    ViTModel,
)
from levelhead.shapes import require_known

Form = Literal["full", "small"]
FORMS = get_args(Form)
IMAGES = (ImageFolder, Shards, TorchvisionData, BuiltinImages)
TEXTS = (DatasetsText, TextFiles, BuiltinText)


class Recipe(Part):
    """One form of one experiment; what is left open is the variant, the init and the seed."""

    name: str
    """``vision/vit_b_imagenet``, or the stem of one's own file."""
    form: Form
    title: str
    rows: tuple[str, ...] = ()
    """Rows of ``paper_results.yaml`` that it stands for."""
    variants: tuple[str, ...] = ("softmax",)
    """Variants that the paper compares; the first is its baseline."""
    inits: tuple[str, ...] = ("default",)
    """Initialisers that the paper compares."""
    model: Model
    data: Data
    augmentation: Augmentation | None = None
    """Of images."""
    training: TrainingPlan
    evaluation: Evaluation = Evaluation()
    deviations: tuple[str, ...] = ()
    """Where this differs from what the paper did, or from what it says."""
    changed: tuple[str, ...] = ()
    """Overrides that were given, beside what the recipe had: deviations as well."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        for wanted, models in ((IMAGES, (TimmModel, ViTModel)),
                               (TEXTS, (GPTModel, TransformersModel)),
                               (RetrievalData, RetrievalModel)):  # fmt: skip
            if isinstance(self.data, wanted) != isinstance(self.model, models):
                raise ValueError(
                    f"model and data must be of one kind, got model.kind={self.model.kind}, "
                    f"data.kind={self.data.kind}"
                )
        if isinstance(self.data, IMAGES) != (self.augmentation is not None):
            raise ValueError("augmentation must be given with images and only then")
        if self.training.layer_decay is not None and not isinstance(self.model, TimmModel):
            raise ValueError(f"layer_decay needs a timm model, got model.kind={self.model.kind}")
        if self.training.epochs is not None and not isinstance(self.data, IMAGES):
            raise ValueError(f"data.kind={self.data.kind} counts steps, not epochs")
        return self

    def resolved(self) -> dict[str, Any]:
        """Return every value, none left to a default, as plain values for YAML or JSON."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """Eight letters that change with any value but the wording."""
        values = self.model_dump(mode="json", exclude={"title", "deviations", "changed"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]

    @classmethod
    def from_resolved(cls, values: Mapping[str, Any]) -> "Recipe":
        """Read back what ``resolved`` wrote.

        Args:
            values: Plain values.

        Returns:
            The recipe.

        Raises:
            ValueError: Values that are not a recipe's.
        """
        return _validated(dict(values), "recipe", {})


def load_recipe(
    name_or_path: str | Path, form: Form = "full", overrides: Iterable[str] = ()
) -> Recipe:
    """Read a recipe, choose its form, apply overrides, check everything.

    Args:
        name_or_path: As ``levelhead list recipes`` shows it, its last part where that is one of
            a kind, or a .yaml file.
        form: "full", the paper's scale, or "small", which runs on two cores.
        overrides: ``key.of.dots=value`` each; the value is read as YAML and must have the type
            of the key.

    Returns:
        The recipe.

    Raises:
        ValueError: No such recipe, form or key, a value of the wrong type, an impossible
            combination; each with its dotted path.

    Example:
        >>> from levelhead.harness.recipe import load_recipe
        >>> load_recipe("vit_b_imagenet", overrides=["training.epochs=90"]).training.epochs
        90.0
    """
    require_known("form", form, FORMS)
    name = recipe_name(name_or_path)
    given = [parse_override(text) for text in overrides]
    values = form_of(read_recipe(name_or_path), form)
    changed = apply_overrides(values, given)
    values |= {"name": name, "form": form, "changed": changed}
    return _validated(values, f"recipe {name}", {path: raw for path, _, raw in given})


def _validated(values: dict[str, Any], what: str, raw: Mapping[tuple[str, ...], str]) -> Recipe:
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        if _texts_as_given(values, error, raw):
            return _validated(values, what, {})
        problems = "; ".join(_told(values, problem) for problem in error.errors())
        raise ValueError(f"{what}: {problems}") from None


def _texts_as_given(
    values: dict[str, Any], error: ValidationError, raw: Mapping[tuple[str, ...], str]
) -> bool:
    """Put back the letters of an override that YAML read as a number where a text belongs."""
    mended = False
    for problem in error.errors():
        path = _path(values, problem["loc"])
        if problem["type"] == "string_type" and path in raw:
            apply_overrides(values, [(path, raw[path], raw[path])])
            mended = True
    return mended


def _told(values: dict[str, Any], problem: Any) -> str:
    path = _path(values, problem["loc"])
    dotted = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(values, path[:-1]))
        return f"unknown key {dotted}; known there: {known}"
    message = problem["msg"].removeprefix("Value error, ")
    came = "" if problem["type"] in {"missing", "value_error"} else f", got {problem['input']!r}"
    return f"{dotted}: {message}{came}".lstrip(": ")


def _path(values: dict[str, Any], loc: Sequence[Any]) -> tuple[str, ...]:
    """Leave the names of kinds out of pydantic's place: they are no keys."""
    path: list[str] = []
    node: Any = values
    for step in loc:
        if isinstance(node, dict) and step not in node and step == node.get("kind"):
            continue
        path.append(str(step))
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and isinstance(step, int) and step < len(node):
            node = node[step]
    return tuple(path)


def _known_keys(values: dict[str, Any], path: Sequence[str]) -> list[str]:
    part: type[Part] = Recipe
    node: Any = values
    for step in path:
        node = node.get(step) if isinstance(node, dict) else None
        kind = node.get("kind") if isinstance(node, dict) else None
        parts = list(_parts_in(part.model_fields[step].annotation))
        part = next((p for p in parts if _kind(p) == kind), parts[0])
    internal = {"name", "form", "changed"} if part is Recipe else set()
    return [name for name in part.model_fields if name not in internal]


def _parts_in(annotation: Any) -> Iterable[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts_in(inner)


def _kind(part: type[Part]) -> str | None:
    field = part.model_fields.get("kind")
    return get_args(field.annotation)[0] if field else None
