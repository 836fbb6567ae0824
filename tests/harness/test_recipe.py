"""A recipe is strict data: what is wrong is named by its path, and nothing in it can run."""

import pytest
import yaml

from levelhead.harness.recipe import Recipe, load_recipe
from levelhead.harness.recipe_files import KEYS, merge, recipe_names

VIT = "vision/vit_b_imagenet"


def write(folder, name="own", **content):
    """Write a recipe file that extends a recipe of levelhead, with what is given."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"extends": "vision/vit_fashion_mnist", **content}))
    return path


def test_small_is_full_with_what_small_says():
    full, small = load_recipe(VIT), load_recipe(VIT, "small")
    assert full.training.weight_decay == small.training.weight_decay == 0.05
    assert (full.training.epochs, small.training.epochs) == (300, 20)
    assert full.data.kind == "image_folder"
    assert small.data.model_dump() == {
        "kind": "builtin_images",
        "name": "digits",
        "num_workers": 0,
    }
    assert set(full.deviations) < set(small.deviations)


def test_resolved_values_are_complete_and_read_back():
    for form in ("full", "small"):
        recipe = load_recipe("gpt2_tinystories", form, ["training.steps=7"])
        assert Recipe.from_resolved(yaml.safe_load(yaml.safe_dump(recipe.resolved()))) == recipe


def test_the_hash_follows_values_and_not_words():
    recipe = load_recipe(VIT)
    assert load_recipe(VIT).hash == recipe.hash
    assert load_recipe(VIT, overrides=["training.batch_size=512"]).hash != recipe.hash
    assert load_recipe(VIT, "small").hash != recipe.hash
    assert recipe.model_copy(update={"title": "other words"}).hash == recipe.hash


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(VIT).training.batch_size = 2


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.learning_rate=1e-3", ("training", "learning_rate"), 1e-3),
        ("training.betas=[0.9, 0.95]", ("training", "betas"), (0.9, 0.95)),
        ("training.clip_norm=null", ("training", "clip_norm"), None),
        ("training.mixed_precision=no", ("training", "mixed_precision"), "no"),
        ("data.path=2012", ("data", "path"), "2012"),
        ("augmentation.random_crop=true", ("augmentation", "random_crop"), True),
    ],
)
def test_overrides_take_the_type_of_their_key(override, path, value):
    recipe = load_recipe(VIT, overrides=[override])
    assert getattr(getattr(recipe, path[0]), path[1]) == value


def test_overrides_are_told_as_deviations():
    changed = load_recipe(VIT, overrides=["training.batch_size=512"]).changed
    assert changed == ("training.batch_size=512 (not 1024)",)
    assert load_recipe(VIT, overrides=["training.batch_size=1024"]).changed == ()


def test_steps_take_the_place_of_epochs():
    plan = load_recipe(VIT, overrides=["training.steps=5"]).training
    assert (plan.steps, plan.epochs, plan.warmup_epochs) == (5, None, None)


def test_another_kind_takes_away_what_the_old_one_had():
    recipe = load_recipe(VIT, overrides=["data.kind=torchvision", "data.name=cifar10"])
    assert recipe.data.path == "data"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.optionz=1", r"recipe vision/vit_b_imagenet: unknown key model\.optionz; known "
         "there: kind, name, options, num_params, weights"),
        ("model.options.dept=1", r"unknown key model\.options\.dept; known there: img_size"),
        ("trainin.steps=1", "unknown key trainin; known there: title, rows, variants"),
        ("training.batch_size=big", r"training\.batch_size: .* valid integer, got 'big'"),
        ("training.batch_size=2.5", r"training\.batch_size: .* integer"),
        ("training.batch_size=0", r"training\.batch_size: .* greater than or equal to 1, got 0"),
        ("training.batch_size=true", r"training\.batch_size: .* valid integer, got True"),
        ("training.learning_rate=.nan", r"training\.learning_rate: .* finite"),
        ("training.schedule=linear", r"training\.schedule: .*'cosine'.*got 'linear'"),
        ("training.betas=[0.9]", r"training\.betas"),
        ("model.name=hf-hub:some/model", r"model\.name: .* pattern"),
        ("model.name=os.system", r"model\.name: .* pattern"),
        ("model.kind=gpt", "model and data must be of one kind, got model.kind=gpt, "
         "data.kind=image_folder"),
        ("data.kind=nowhere", r"data: .*'image_folder', 'shards', 'torchvision'"),
        ("augmentation.mean=[0.5]", "mean and std must have num_channels=3 numbers, got 1 and 3"),
        ("augmentation.random_crop=false", "randaugment, color_jitter and erasing need"),
        ("augmentation=null", "augmentation must be given with images and only then"),
        ("training.warmup_steps=3", "warmup_epochs and warmup_steps must not both be given"),
        ("training.epochs=null", "either epochs or steps must be given"),
        ("training.batch_size.x=1", r"training\.batch_size\.x must lead to a key, got "
         r"training\.batch_size, which is a value"),
        ("training.batch_size", "an override must be key=value"),
        ("a-b=1", "an override must be key=value"),
        ("training.betas=[1", "the value of override 'training.betas=.1' is not YAML"),
        ("model.name=!!python/name:os.system", "is not YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_path(override, words):
    with pytest.raises(ValueError, match=words):
        load_recipe(VIT, overrides=[override])


def test_impossible_combinations_of_other_kinds():
    with pytest.raises(ValueError, match="layer_decay needs a timm model, got model.kind=vit"):
        load_recipe("vit_fashion_mnist", overrides=["training.layer_decay=0.5"])
    with pytest.raises(ValueError, match="data.kind=datasets counts steps, not epochs"):
        load_recipe("gpt2_tinystories", overrides=["training.epochs=2"])


def test_unknown_names_and_forms_list_what_is_known():
    with pytest.raises(ValueError, match="got 'vit_z'; valid: language/affine_0_5b"):
        load_recipe("vit_z")
    with pytest.raises(ValueError, match="unknown form 'tiny'; known: full, small"):
        load_recipe(VIT, "tiny")
    with pytest.raises(ValueError, match=r"nowhere\.yaml: no such file"):
        load_recipe("nowhere.yaml")
    with pytest.raises(ValueError, match="a recipe must be one of those"):
        load_recipe("vision/_imagenet")


def test_a_file_of_ones_own_extends_a_recipe_here_or_a_neighbour(tmp_path):
    write(tmp_path, "base", full={"training": {"batch_size": 14}})
    own = tmp_path / "own.yaml"
    own.write_text("extends: vision/vit_fashion_mnist\nfull: {training: {batch_size: 22}}")
    recipe = load_recipe(own)
    assert (recipe.name, recipe.training.batch_size) == ("own", 22)
    alone = tmp_path / "alone.yaml"
    alone.write_text("extends: own")
    with pytest.raises(ValueError, match="a recipe may extend one that extends nothing itself"):
        load_recipe(alone)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "~/x", "http://x/y", "a.b", "", 3]
)
def test_extends_cannot_leave_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match="extends must name a recipe by plain words and slashes"):
        load_recipe(write(tmp_path, extends=name))


def test_extends_cannot_leave_its_folder_through_a_link(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    write(tmp_path, "outside")
    (inside / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    with pytest.raises(ValueError, match="what a recipe extends must lie in .*inside"):
        load_recipe(write(inside, extends="link"))


def test_extends_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"extends: nowhere .* nor among the recipes"):
        load_recipe(write(tmp_path, extends="nowhere"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title: !!python/object/apply:os.system ['true']", "not plain YAML: could not determine"),
        ("title: !!python/name:os.system", "not plain YAML: could not determine"),
        ("title: a\ntitle: b", "the key 'title' stands twice"),
        ("- 1", "must be a mapping, got list"),
        ("titel: a", f"these are no keys of a recipe file, got titel; valid: {', '.join(KEYS)}"),
        ("full: 3", "full must be a mapping"),
        ("deviations: {full: words}", "deviations must be lists of text"),
        ("deviations: {medium: []}", "deviations must be lists of text"),
        ("a: [", "not plain YAML"),
        ("full: {a: &a [1, 2], b: *a}", r"not plain YAML: the alias \*a is not allowed"),
        ("full: &a {b: *a}", r"not plain YAML: the alias \*a is not allowed"),
        ("title: " + "[" * 9_000 + "]" * 9_000, "not plain YAML: its values lie too deep"),
        ("title: \x00", "not plain YAML"),
        ("title: " + "a" * 100_000, "at most 100,000 bytes, got 100,007"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, words):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_recipe(path)


def test_yaml_reads_words_and_numbers_as_a_person_would(tmp_path):
    path = write(tmp_path)
    path.write_text(
        "extends: vision/vit_fashion_mnist\n"
        "full: {training: {mixed_precision: no, learning_rate: 2e-3, eps: 1E-7}}"
    )
    training = load_recipe(path).training
    assert (training.mixed_precision, training.learning_rate, training.eps) == ("no", 2e-3, 1e-7)


def test_merging_replaces_lists_and_mappings_of_another_kind():
    base = {"a": {"kind": "x", "p": 1}, "b": [1, 2], "c": {"p": 1, "q": 2}}
    new = {"a": {"kind": "y", "r": 3}, "b": [3], "c": {"q": 4}}
    assert merge(base, new) == {"a": {"kind": "y", "r": 3}, "b": [3], "c": {"p": 1, "q": 4}}
    assert base["c"] == {"p": 1, "q": 2}


def test_remote_code_is_off_in_every_recipe():
    for name in recipe_names():
        assert not getattr(load_recipe(name).data, "trust_remote_code", False)
