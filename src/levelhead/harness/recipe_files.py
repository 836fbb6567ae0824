"""Recipe files: where they lie, how one extends another, how a form and overrides are applied.

title: ...            in words
extends: name         at most one level, from the same folder or from the recipes here
rows: [...]           of paper_results.yaml
variants, inits       what the paper compares
full: {...}           model, data, augmentation, training, evaluation
small: {...}          what differs from full
deviations: {full: [...], small: [...]}
"""

import copy
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from levelhead.shapes import require

ROOT = Path(__file__).parent / "recipes"
HEAD = ("title", "rows", "variants", "inits")
KEYS = (*HEAD, "extends", "full", "small", "deviations")
NEAR = 0.75  # of 1, by difflib's ratio; unrelated recipes of one family come to about 0.7
MAX_BYTES = 100_000  # a recipe is a page or two

RIVALS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("training", "steps"): ("epochs", "warmup_epochs"),
    ("training", "epochs"): ("steps", "warmup_steps"),
}
"""Keys that an override of another takes away: a training is counted in one of the two."""

Override = tuple[tuple[str, ...], Any, str]
"""Path of keys, value as YAML reads it, value as it was written."""


def recipe_names() -> list[str]:
    """List the recipes that come with levelhead, without those that others extend.

    Returns:
        Names such as ``vision/vit_b_imagenet``, sorted.
    """
    paths = [path for path in ROOT.rglob("*.yaml") if not path.stem.startswith("_")]
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)


def recipe_name(name_or_path: str | Path) -> str:
    """Return what a recipe is called.

    Args:
        name_or_path: A name, its last part, or a file.

    Returns:
        The whole name, or the stem of the file.

    Raises:
        ValueError: No such recipe.
    """
    path = _find(name_or_path)
    return _inside(path, ROOT) or path.stem


def read_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Read a recipe file with what it extends.

    Args:
        name_or_path: A name, its last part, or a file.

    Returns:
        The keys of ``KEYS`` but ``extends``.

    Raises:
        ValueError: No such recipe, or a file that is not one.
    """
    path = _find(name_or_path)
    own = _read(path)
    if "extends" not in own:
        return own
    base_path = _find_base(path, own.pop("extends"))
    base = _read(base_path)
    require(
        "extends" not in base,
        f"a recipe may extend one that extends nothing itself (in {path})",
        f"extends: {_shown(base_path)}, which extends {base.get('extends')!r}",
    )
    deviations = {
        form: base.get("deviations", {}).get(form, []) + own.get("deviations", {}).get(form, [])
        for form in ("full", "small")
    }
    return merge(base, own) | {"deviations": deviations}


def form_of(recipe: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Choose a form: ``small`` is ``full`` with what ``small`` says.

    Args:
        recipe: As ``read_recipe`` gives it.
        form: "full" or "small".

    Returns:
        The values of a ``Recipe`` but its name and form.
    """
    values = {key: copy.deepcopy(recipe[key]) for key in HEAD if key in recipe}
    values |= copy.deepcopy(recipe.get("full", {}))
    deviations = list(recipe.get("deviations", {}).get("full", []))
    if form == "small":
        values = merge(values, recipe.get("small", {}))
        deviations += recipe.get("deviations", {}).get("small", [])
    return values | {"deviations": deviations}


def merge(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another, mapping by mapping.

    A list or a number replaces; a mapping of another ``kind`` replaces as a whole.

    Args:
        base: Below.
        new: On top.

    Returns:
        A new mapping.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in new.items():
        merged[key] = _laid_over(merged.get(key), value)
    return merged


def _laid_over(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return copy.deepcopy(new)
    is_same_kind = new.get("kind", old.get("kind")) == old.get("kind")
    return merge(old, new) if is_same_kind else copy.deepcopy(new)


def parse_override(text: str) -> Override:
    """Read ``key.of.dots=value``.

    Args:
        text: As on the command line.

    Returns:
        The path, the value, and the value's letters.

    Raises:
        ValueError: Not of that form.
    """
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    require(
        bool(equals) and all(re.fullmatch(r"\w+", step) for step in path),
        "an override must be key=value with a dotted key",
        repr(text),
        "training.batch_size=256, model.options.depth=2",
    )
    return path, _plain(raw, f"the value of override {text!r} is not YAML"), raw.strip()


def apply_overrides(values: dict[str, Any], overrides: Iterable[Override]) -> list[str]:
    """Set values in place; another ``kind`` takes away what the old one had.

    Args:
        values: Of a recipe.
        overrides: What to set.

    Returns:
        For each, in words, what it was before.

    Raises:
        ValueError: A path that leads through something that is no mapping.
    """
    changed = []
    for path, value, raw in sorted(overrides, key=lambda override: override[0][-1] != "kind"):
        node = values
        for depth, step in enumerate(path[:-1]):
            node = node.setdefault(step, {})
            require(
                isinstance(node, dict),
                f"{'.'.join(path)} must lead to a key",
                f"{'.'.join(path[: depth + 1])}, which is a value",
            )
        before = node.get(path[-1])
        if before != value:
            for rival in list(node) if path[-1] == "kind" else RIVALS.get(path, ()):
                node.pop(rival, None)
            node[path[-1]] = value
            was = "the recipe leaves it to its default" if before is None else f"not {before}"
            changed.append(f"{'.'.join(path)}={raw} ({was})")
    return changed


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        require(path.is_file(), "a recipe must be a name or a file", f"{path}: no such file")
        return path
    names = recipe_names()
    name = str(name_or_path)
    matching = [n for n in names if n == name] or [n for n in names if n.endswith(f"/{name}")]
    require(
        len(matching) == 1,
        "a recipe must be one of those that `levelhead list recipes` shows, or a .yaml file",
        f"{name!r}" + (f", which may be {' or '.join(matching)}" if matching else ""),
        ", ".join(_near(name, names) or names),
    )
    return ROOT / f"{matching[0]}.yaml"


def _near(name: str, names: Iterable[str]) -> list[str]:
    """The names that a name with a slip of the hand most likely means."""
    by_end = {known if "/" in name else known.rpartition("/")[2]: known for known in names}
    return [by_end[end] for end in get_close_matches(name.lower(), by_end, cutoff=NEAR)]


def _find_base(path: Path, name: Any) -> Path:
    require(
        isinstance(name, str) and re.fullmatch(r"\w+(/\w+)*", name) is not None,
        f"extends must name a recipe by plain words and slashes (in {path})",
        f"{name!r}",
        "a file of the same folder without .yaml, or a recipe of `levelhead list recipes`",
    )
    for folder in (path.parent, ROOT):
        base = folder / f"{name}.yaml"
        if base.is_file() and base.resolve() != path.resolve():
            require(
                _inside(base, folder) is not None,
                f"what a recipe extends must lie in {folder}",
                f"{name}, a link to {base.resolve()}",
            )
            return base
    raise ValueError(
        f"extends: {name} (in {path}): no {name}.yaml in {path.parent}, nor among the recipes "
        f"of levelhead: {', '.join(recipe_names())}"
    )


def _inside(path: Path, folder: Path) -> str | None:
    """Return a path's name within a folder, or None where links lead out of it."""
    real, root = path.resolve(), folder.resolve()
    if not real.is_relative_to(root):
        return None
    return real.relative_to(root).with_suffix("").as_posix()


def _shown(path: Path) -> str:
    return _inside(path, ROOT) or str(path)


def _read(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    require(size <= MAX_BYTES, f"a recipe must have at most {MAX_BYTES:,} bytes", f"{size:,}")
    recipe = _plain(path.read_bytes(), f"{path} is not plain YAML")
    require(isinstance(recipe, dict), f"{path} must be a mapping", type(recipe).__name__)
    unknown = [key for key in recipe if key not in KEYS]
    require(
        not unknown,
        f"{path}: these are no keys of a recipe file",
        ", ".join(map(str, unknown)),
        ", ".join(KEYS),
    )
    for key in ("full", "small", "deviations"):
        part = recipe.get(key, {})
        require(isinstance(part, dict), f"{path}: {key} must be a mapping", repr(part)[:80])
    for form, lines in recipe.get("deviations", {}).items():
        require(
            form in {"full", "small"} and _are_texts(lines),
            f"{path}: deviations must be lists of text under full and small",
            f"{form}: {lines!r}"[:120],
        )
    return recipe


def _are_texts(lines: Any) -> bool:
    return isinstance(lines, list) and all(isinstance(line, str) for line in lines)


def _plain(text: str | bytes, complaint: str) -> Any:
    try:
        return yaml.load(text.decode() if isinstance(text, bytes) else text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{complaint}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{complaint}: its values lie too deep in one another") from None


class _Loader(yaml.SafeLoader):
    """Plain values only; ``no`` is a word and ``1e-3`` a number.

    No tags, no doubled keys, and no aliases: a page of them stands for more than memory holds.
    """

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.YAMLError(f"the alias *{alias.anchor} is not allowed{alias.start_mark}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(f"the key {twice[0]!r} stands twice{node.start_mark}")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
     list("-+.0123456789")),
):  # fmt: skip
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )
