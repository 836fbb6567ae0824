"""Images from every format; what is missing, broken, lost or wrong is told; batches are exact."""

import io
import json
import logging
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image
from samples import image_folder, jpeg, shard
from torch import nn

from levelhead.harness.config import Cell
from levelhead.harness.order import order
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_tasks import make_recipe_task
from levelhead.harness.train import start_model
from levelhead.harness.vision.samples import seeded
from levelhead.harness.vision.shard_names import expand_braces
from levelhead.harness.vision.shards import index_shards
from levelhead.harness.vision.sources import TORCHVISION

VIT = "vision/vit_b_imagenet"
TINY = [
    "model.name=vit_tiny_patch16_224", "model.num_params=null",
    "model.options.embed_dim=12", "model.options.depth=1", "model.options.num_heads=2",
    "model.options.img_size=32", "augmentation.image_size=32", "data.num_workers=0",
    "training.batch_size=4", "training.epochs=2", "training.warmup_epochs=0",
    "augmentation.repeats=1",
]  # fmt: skip


def folder_task(root, *overrides, num_train=6):
    given = [f"data.path={root}", "data.num_classes=2", f"data.num_train={num_train}"]
    return make_recipe_task(load_recipe(VIT, "full", [*TINY, *given, *overrides]))


def shard_task(root, *overrides, num_train=8):
    given = [
        "data.kind=shards", f"data.train={root}/train-*.tar", f"data.test={root}/test-*.tar",
        "data.num_classes=2", f"data.num_train={num_train}", "data.num_workers=0",
    ]  # fmt: skip
    tiny = [text for text in TINY if not text.startswith("data.")]
    return make_recipe_task(load_recipe(VIT, "full", [*tiny, *given, *overrides]))


def small_task(*overrides, name="vit_fashion_mnist"):
    return make_recipe_task(load_recipe(name, "small", overrides))


def take(task, seed=0, start_step=0, count=1):
    batches = task.batches(seed, start_step)
    return [next(batches) for _ in range(count)]


def assert_same(first, second):
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b)


def test_every_sample_of_an_epoch_comes_once_and_in_another_order_each_time():
    keys = order(13, 4, seed=3)
    epochs = [[index for _ in range(3) for index, _ in next(keys)] for _ in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == 12
    assert epochs[0] != epochs[1]
    seeds = [seed for _ in range(5) for _, seed in next(keys)]
    assert len(set(seeds)) == len(seeds)


def test_repeated_augmentation_repeats_within_an_epoch_of_the_same_length():
    keys = order(12, 6, seed=3, repeats=3)
    epoch = [index for _ in range(2) for index, _ in next(keys)]
    assert [epoch.count(index) for index in dict.fromkeys(epoch)] == [3, 3, 3, 3]


def test_an_epoch_smaller_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at most the samples of an epoch"):
        next(order(3, 4, seed=0))


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    task = folder_task(image_folder(tmp_path))
    whole = take(task, count=4)
    torch.manual_seed(9)
    np.random.seed(9)
    assert_same(take(task, start_step=2, count=2), whole[2:])
    assert not torch.equal(take(task, seed=1)[0][0], whole[0][0])
    assert not torch.equal(whole[0][0], whole[1][0])


def test_worker_processes_change_nothing(tmp_path):
    root = image_folder(tmp_path)
    alone, helped = folder_task(root), folder_task(root, "data.num_workers=1")
    assert_same(take(alone, count=3), take(helped, count=3))


def test_batches_leave_the_global_random_sources_alone(tmp_path):
    task = folder_task(image_folder(tmp_path))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    take(task, count=2)
    assert torch.equal(torch.rand(2), expected)


def test_seeded_puts_every_source_back():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with seeded(2**40 + 3):
        drawn = torch.rand(1), np.random.rand()
    with seeded(2**40 + 3):
        assert (torch.rand(1), np.random.rand()) == drawn
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_the_full_pipeline_augments_mixes_and_learns(tmp_path):
    task = folder_task(image_folder(tmp_path))
    images, targets = take(task)[0]
    assert images.shape == (4, 3, 32, 32)
    assert targets.shape == (4, 2)
    assert torch.allclose(targets.sum(1), torch.ones(4))  # mixed and smoothed, still a law
    model = task.start("softmax", 0)
    task.loss(model, (images, targets)).backward()
    assert set(task.evaluate(model)) == {"accuracy_pct", "loss_nats"}


def test_smoothing_without_mixing(tmp_path):
    task = folder_task(
        image_folder(tmp_path), "augmentation.mixup=0", "augmentation.cutmix=0",
        "augmentation.label_smoothing=0.3",
    )  # fmt: skip
    images, labels = take(task)[0]
    logits = torch.randn(4, 2)
    law = 0.7 * nn.functional.one_hot(labels, 2) + 0.15
    expected = -(law * logits.log_softmax(1)).sum(1).mean()
    assert torch.allclose(task.loss(lambda images: logits, (images, labels)), expected)


def test_evaluation_is_the_accuracy_of_all_test_images():
    task = small_task("evaluation.batch_size=97")
    source = task.test_source
    labels = torch.tensor([source.read(i)[1] for i in range(len(source))])

    class Says3(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, images):
            return nn.functional.one_hot(torch.full((len(images),), 3), 10).float()

    share = 100 * (labels == 3).double().mean().item()
    assert task.evaluate(Says3())["accuracy_pct"] == pytest.approx(share, abs=1e-12)


def test_variants_share_their_start():
    task = small_task(name="vit_b_imagenet")
    base, quest = task.start("softmax", 3), task.start("gate", 3)
    own = dict(quest.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in base.named_parameters())
    assert not torch.equal(task.start("softmax", 4).patch_embed.proj.weight,
                           base.patch_embed.proj.weight)  # fmt: skip


def test_layer_decay_slows_early_layers():
    task = small_task("training.layer_decay=0.5", name="vit_b_imagenet")
    model = task.start("softmax", 0)
    rate = {id(p): g["lr_scale"] for g in task.parameter_groups(model) for p in g["params"]}
    rates = [rate[id(p)] for p in (model.patch_embed.proj.weight, model.blocks[0].mlp.fc1.weight,
                                   model.blocks[1].mlp.fc1.weight, model.head.weight)]  # fmt: skip
    assert rates == [0.125, 0.25, 0.5, 1.0]


def test_weights_start_a_fine_tuning_but_for_the_head(tmp_path):
    from safetensors.torch import save_file

    before = small_task(name="vit_b_imagenet").start("softmax", 1)
    state = {k: v.contiguous() for k, v in before.state_dict().items() if "head" not in k}
    path = tmp_path / "vit.safetensors"
    save_file(state | {"head.weight": torch.zeros(7, 48), "head.bias": torch.zeros(7)}, path)
    task = small_task(f"model.weights={path}", name="transfer_cifar10")
    model = task.start("softmax", 0)
    assert torch.equal(model.blocks[1].mlp.fc2.weight, before.blocks[1].mlp.fc2.weight)
    assert model.head.weight.shape == (10, 48)
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="must hold the weights of this model but for its head"):
        task.start("softmax", 0)
    with pytest.raises(ValueError, match="model.weights must be a .safetensors file, got x.pt"):
        small_task("model.weights=x.pt", name="transfer_cifar10").start("softmax", 0)
    with pytest.raises(FileNotFoundError, match="no x.safetensors: model.weights must name"):
        small_task("model.weights=x.safetensors", name="transfer_cifar10").start("softmax", 0)


def test_an_init_that_would_overwrite_trained_weights_is_refused(tmp_path):
    task = small_task("model.weights=vit.safetensors", name="transfer_cifar10")
    cell = Cell(task=task.settings.name, variant="softmax", init="conditioned", seed=0)
    words = "init must be default where .* got init=conditioned, which would overwrite those of"
    with pytest.raises(ValueError, match=words):
        start_model(task, cell)
    with pytest.raises(FileNotFoundError, match=r"no vit\.safetensors"):  # it goes on to load them
        start_model(task, cell.model_copy(update={"init": "default"}))
    plain = small_task(name="transfer_cifar10")
    assert start_model(plain, cell) is not None


def test_a_missing_folder_is_told_with_the_command(tmp_path):
    words = (
        r"no folder .*train: .*ILSVRC2012_img_train\.tar.* and run python -c \"from torchvision"
    )
    with pytest.raises(FileNotFoundError, match=words):
        take(folder_task(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "made"),
    [("vit_t_cifar10", "CIFAR10"), ("vit_t_cifar100", "CIFAR100"), ("vit_t_pets", "OxfordIIITPet"),
     ("vit_t_flowers", "Flowers102"), ("transfer_food101", "Food101")],
)  # fmt: skip
def test_a_missing_data_set_is_told_with_the_command(tmp_path, name, made):
    task = make_recipe_task(load_recipe(name, overrides=[f"data.path={tmp_path}"]))
    words = rf'no whole {made} in .*put it there with python -c "from torchvision.datasets import '
    with pytest.raises(FileNotFoundError, match=words + rf"{made} as D; D\(.*download=True"):
        take(task)


def test_cifar_in_its_own_format(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    root = tmp_path / CIFAR10.base_folder
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (10_000, 3072), dtype=np.uint8)
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        content = {"data": pixels, "labels": [n % 10 for n in range(len(pixels))]}
        (root / name).write_bytes(pickle.dumps(content))
    meta = pickle.dumps({"label_names": list("abcdefghij")})
    (root / CIFAR10.meta["filename"]).write_bytes(meta)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    task = make_recipe_task(
        load_recipe("vit_t_cifar10", overrides=[f"data.path={tmp_path}", "training.batch_size=8",
                                                "data.num_workers=0"])
    )  # fmt: skip
    images, targets = take(task)[0]
    assert (images.shape, targets.shape) == ((8, 3, 32, 32), (8, 10))


def made_pets(root):
    """Two breeds as the set's own lists have them: classes count from 1."""
    (root / "oxford-iiit-pet" / "images").mkdir(parents=True)
    (root / "oxford-iiit-pet" / "annotations").mkdir()
    for part, first in (("trainval", 0), ("test", 4)):
        lines = [f"Abyssinian_{n} {n % 2 + 1} 1 1" for n in range(first, first + 4)]
        (root / "oxford-iiit-pet" / "annotations" / f"{part}.txt").write_text("\n".join(lines))
    for number in range(8):
        path = root / "oxford-iiit-pet" / "images" / f"Abyssinian_{number}.jpg"
        path.write_bytes(jpeg(number))
    return {True: [0, 1, 0, 1], False: [0, 1, 0, 1]}


def made_flowers(root):
    """Images count from 1, and so do classes; the larger part of the set is its test part."""
    from scipy.io import savemat

    (root / "flowers-102" / "jpg").mkdir(parents=True)
    for number in range(1, 9):
        path = root / "flowers-102" / "jpg" / f"image_{number:05d}.jpg"
        path.write_bytes(jpeg(number))
    savemat(root / "flowers-102" / "imagelabels.mat", {"labels": [5, 6, 7, 8, 9, 10, 11, 12]})
    parts = {"trnid": [1, 3], "valid": [2, 8], "tstid": [4, 5, 6, 7]}
    savemat(root / "flowers-102" / "setid.mat", parts)
    return {True: [4, 6, 5, 11], False: [7, 8, 9, 10]}


def made_food(root):
    meta = root / "food-101" / "meta"
    meta.mkdir(parents=True)
    for part, first in (("train", 0), ("test", 2)):
        names = {
            c: [f"{c}/{n}" for n in range(first, first + 2)] for c in ("apple_pie", "waffles")
        }
        (meta / f"{part}.json").write_text(json.dumps(names))
    for kind in ("apple_pie", "waffles"):
        (root / "food-101" / "images" / kind).mkdir(parents=True)
        for number in range(4):
            (root / "food-101" / "images" / kind / f"{number}.jpg").write_bytes(jpeg(number))
    return {True: [0, 0, 1, 1], False: [0, 0, 1, 1]}


@pytest.mark.parametrize(
    ("name", "recipe", "make"),
    [
        ("oxford_pets", "vit_t_pets", made_pets),
        ("flowers102", "vit_t_flowers", made_flowers),
        ("food101", "transfer_food101", made_food),
    ],
)
def test_torchvisions_sets_in_their_own_formats(name, recipe, make, tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)
    monkeypatch.setattr(TORCHVISION[name], "num_train", 4)
    labels = make(tmp_path)
    given = ["training.batch_size=4", "data.num_workers=0", f"data.path={tmp_path}"]
    task = make_recipe_task(load_recipe(recipe, overrides=[*given, "augmentation.image_size=32"]))
    for is_training, source in ((True, task.source), (False, task.test_source)):
        assert [source.read(index)[1] for index in range(len(source))] == labels[is_training]
    images, targets = take(task)[0]
    assert (images.shape, targets.shape) == ((4, 3, 32, 32), (4, task.num_classes))


def test_another_number_of_images_or_classes_is_refused(tmp_path):
    root = image_folder(tmp_path)
    words = "must hold the data.num_train=7 training images of its recipe, got 6; valid: the whole"
    with pytest.raises(ValueError, match=words):
        take(folder_task(root, num_train=7))
    with pytest.raises(ValueError, match="data.num_classes=3 folders, one for each class, got 2"):
        take(folder_task(root, "data.num_classes=3"))


def test_truncated_images_are_skipped_counted_and_refused_above_1_percent(tmp_path, caplog):
    root = image_folder(tmp_path, per_class=100)
    broken = root / "train" / "n00000000" / "5.jpeg"
    broken.write_bytes(broken.read_bytes()[:300])
    task = folder_task(root, num_train=200)
    with caplog.at_level(logging.WARNING):
        batches = take(task, count=100)
    assert all(images.isfinite().all() for images, _ in batches)
    assert all(len(images) == 4 for images, _ in batches)
    assert len(task.broken.indices) == 1
    assert caplog.text.count(f"skipped a broken image: {broken}") == 1
    for number in (6, 7):
        (root / "train" / "n00000000" / f"{number}.jpeg").write_bytes(b"no image at all")
    with pytest.raises(ValueError, match="at most 1% of the images of .* may be broken, got 3 of"):
        take(folder_task(root, num_train=200), count=200)


def test_broken_test_images_are_left_out_of_the_accuracy(tmp_path):
    root = image_folder(tmp_path, per_class=100)
    (root / "val" / "n00000000" / "5.jpeg").write_bytes(b"")
    task = folder_task(root, "model.options.embed_dim=2", "model.options.num_heads=1",
                       num_train=200)  # fmt: skip
    found = task.evaluate(task.start("softmax", 0))
    assert found["images_skipped"] == 1
    assert round(found["accuracy_pct"] * 199 / 100, 6).is_integer()


def test_shards_give_their_images_and_labels(tmp_path):
    for number in range(2):
        shard(tmp_path / f"train-{number}.tar", first=4 * number)
    shard(tmp_path / "test-0.tar")
    task = shard_task(tmp_path)
    index = index_shards(f"{tmp_path}/train-*.tar")
    assert [sample.label for sample in index.samples] == [0, 1] * 4
    assert (index.num_lost, index.losses) == (0, ())
    assert index.samples[5].read().getvalue() == jpeg(5)
    assert take(task)[0][0].shape == (4, 3, 32, 32)
    assert task.evaluate(task.start("softmax", 0))["accuracy_pct"] >= 0


def test_a_shard_corrupt_in_its_middle_loses_only_what_is_broken(tmp_path):
    path = shard(tmp_path / "train-0.tar", count=200)
    content = bytearray(path.read_bytes())
    place = content.index(b"000100.jpg")
    content[place : place + 512] = b"\xff" * 512  # one header
    path.write_bytes(content)
    index = index_shards(str(path))
    keys = [sample.key for sample in index.samples]
    assert keys == [f"{n:06d}" for n in range(200) if n != 100]
    assert 1 <= index.num_lost <= 2
    assert "samples lost" in index.losses[0]
    shard(tmp_path / "test-0.tar")
    task = shard_task(tmp_path, num_train=200)
    assert len(task.source) == 199
    take(task)


@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_truncated_shard_is_refused_above_1_percent(tmp_path, kept):
    path = shard(tmp_path / "train-0.tar", count=50)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * content.index(b"\0" * 9000))])
    with pytest.raises(ValueError, match="at most 1% of the samples may be lost .* got about|"
                       "must hold the data.num_train=50"):  # fmt: skip
        take(shard_task(tmp_path, num_train=50))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{0..3}.tar", ["a-0.tar", "a-1.tar", "a-2.tar", "a-3.tar"]),
        ("a-{008..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("a-{8..10}", ["a-8", "a-9", "a-10"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{train,val}-{0..1}", ["train-0", "train-1", "val-0", "val-1"]),
        ("{a,b{1..2}}", ["a", "b1", "b2"]),
        ("{a,}x", ["ax", "x"]),
        ("{a}.tar", ["{a}.tar"]),
        ("a-*.tar", ["a-*.tar"]),
    ],
)
def test_braces_are_those_of_a_shell(pattern, names):
    assert expand_braces(pattern) == names
    if shutil.which("bash"):
        said = subprocess.check_output(["bash", "-fc", f"echo {pattern}"], text=True)
        assert said.split() == names


def test_shards_by_braces_are_those_by_wildcards_and_none_may_be_missing(tmp_path):
    for number in range(3):
        shard(tmp_path / f"train-{number:05d}.tar", first=4 * number)
    by_wildcard = index_shards(f"{tmp_path}/train-*.tar")
    assert len(by_wildcard.samples) == 12
    assert index_shards(f"{tmp_path}/train-{{00000..00002}}.tar") == by_wildcard
    assert index_shards(f"{tmp_path}/train-{{00000,0000[12]}}.tar") == by_wildcard
    words = r"2 of the 5 shards that .* names are missing: .*train-00003\.tar, .*train-00004\.tar$"
    with pytest.raises(FileNotFoundError, match=words):
        index_shards(f"{tmp_path}/train-{{00000..00004}}.tar")
    with pytest.raises(FileNotFoundError, match="no shard matches .*test-{0..9}"):
        index_shards(f"{tmp_path}/test-{{0..9}}.tar")


def test_empty_and_missing_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match="no shard matches .*put webdataset .tar files"):
        take(shard_task(tmp_path))
    (tmp_path / "train-0.tar").write_bytes(b"")
    with pytest.raises(ValueError, match="must hold samples: an image and a .cls file each"):
        take(shard_task(tmp_path))


def test_labels_out_of_range_and_no_labels(tmp_path):
    shard(tmp_path / "train-0.tar", count=8, label=lambda number: 5)
    with pytest.raises(ValueError, match=r"labels must be 0 \.\. 1, got 5 \(.*train-0.tar, 00000"):
        take(shard_task(tmp_path))
    shard(tmp_path / "train-0.tar", count=8, label=lambda number: "cat")
    with pytest.raises(ValueError, match="000000.cls must hold a label as digits, got b'cat'"):
        take(shard_task(tmp_path))


def test_options_that_timm_does_not_take():
    with pytest.raises(ValueError, match="model.name must be a model of timm, got 'vit_z'"):
        small_task("model.name=vit_z", name="vit_b_imagenet").start("softmax", 0)
    with pytest.raises(ValueError, match="timm cannot build vit_tiny_patch16_224 with"):
        small_task("model.options.window_size=7", name="vit_b_imagenet").start("softmax", 0)
    with pytest.raises(ValueError, match="training.batch_size must be even for mixup"):
        small_task("training.batch_size=7", name="vit_b_imagenet")
    with pytest.raises(ValueError, match="model.options.in_chans must be augmentation.num_chan"):
        small_task("model.options.in_chans=3", name="vit_b_imagenet").start("softmax", 0)


def test_a_palette_image_becomes_rgb(tmp_path):
    root = image_folder(tmp_path)
    buffer = io.BytesIO()
    Image.new("P", (9, 7)).save(buffer, "PNG")
    (root / "train" / "n00000000" / "0.jpeg").write_bytes(buffer.getvalue())
    take(folder_task(root), count=2)
