"""Text from every format, whole and streamed: exact windows, and what is missing or wrong told."""

import math

import datasets
import pytest
import torch
from samples import SENTENCE, parquet, text_folder, tokenizer_folder
from torch.nn import functional as F

from levelhead.harness.language.tokenizer import Bytes, load_tokenizer
from levelhead.harness.language.windows import Windows
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_tasks import make_recipe_task, task_of

TINY = [
    "model.vocab_size=300", "model.context_length=7", "model.embed_dim=12", "model.num_layers=1",
    "model.num_heads=2", "model.num_params=null", "training.batch_size=4", "training.steps=3",
    "training.warmup_steps=0", "training.decay_steps=0", "evaluation.max_samples=5",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # What datasets waits for threads of a remote file at the end of every stream: here are none.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    datasets.disable_progress_bars()


def hub_task(path, *overrides, name="gpt2_tinystories"):
    given = [f"data.path={path}", "data.name=null", "data.tokenizer=bytes"]
    return make_recipe_task(load_recipe(name, overrides=[*TINY, *given, *overrides]))


def file_task(train, *overrides, test=None):
    given = ["data.kind=text_files", f"data.train={train}", f"data.test={test or train}"]
    return make_recipe_task(load_recipe("gpt2_tinystories", overrides=[*TINY, *given, *overrides]))


def take(task, seed=0, start_step=0, count=1):
    batches = task.batches(seed, start_step)
    return [next(batches) for _ in range(count)]


def test_windows_cover_the_text_once_an_epoch():
    windows = Windows(torch.arange(50), 7)
    assert len(windows) == 7
    inputs, targets = windows.take(torch.arange(7))
    assert inputs.flatten().tolist() == list(range(49))
    assert torch.equal(targets, inputs + 1)
    batches = windows.batches(3, seed=0, start_step=0)
    seen = torch.cat([next(batches)[0][:, 0] for _ in range(2)])
    assert len(set(seen.tolist())) == 6


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_batches_depend_on_seed_and_step_alone(tmp_path, streaming):
    task = hub_task(text_folder(tmp_path / "set"), f"data.streaming={streaming}")
    whole, later = take(task, count=5), take(task, start_step=3, count=2)
    for one, two in zip(whole[3:], later, strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1][:, :-1], one[0][:, 1:])
    assert not torch.equal(take(task, seed=1)[0][0], whole[0][0])


def test_a_stream_holds_the_text_and_goes_on_after_its_end(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    parquet(folder / "train.parquet", ["abcdefgh" * 4])
    parquet(folder / "validation.parquet", ["abcdefgh" * 4])
    task = hub_task(folder, "data.streaming=true", "training.batch_size=2")
    text = Bytes()(["abcdefgh" * 4])[0]
    rows = torch.cat([inputs for inputs, _ in take(task, count=4)]).tolist()
    assert rows == [text[7 * n : 7 * n + 7] for n in range(4)] * 2


def test_streamed_and_whole_test_text_give_one_perplexity(tmp_path):
    folder = text_folder(tmp_path / "set")
    whole = hub_task(folder, "evaluation.max_samples=null")
    streamed = hub_task(folder, "data.streaming=true", "evaluation.max_samples=null")
    model = whole.start("softmax", 0)
    found = whole.evaluate(model)
    assert streamed.evaluate(model) == found
    inputs, targets = whole.test_windows.take(torch.arange(len(whole.test_windows)))
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)


def test_held_out_documents_are_not_trained_on(tmp_path):
    for streaming in ("false", "true"):
        task = hub_task(
            text_folder(tmp_path / "set"), f"data.streaming={streaming}", "data.test_split=null",
            "data.held_out=2", "evaluation.max_samples=null", name="affine_1b",
        )  # fmt: skip
        test = bytes(task.test_windows.tokens.tolist()).decode()
        assert test.startswith("0 The quick")
        assert "\n1 The quick" in test
        assert "\n2 The" not in test
        inputs = torch.cat([inputs for inputs, _ in take(task, count=160)])
        text = bytes(inputs.flatten().tolist())
        assert b"19 T" in text
        assert b"\n1 T" not in text


def test_a_tokenizer_folder_ends_documents_with_its_mark(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path / "tok")))
    ids = tokenizer([SENTENCE, "  ", SENTENCE])
    end = tokenizer.inner.eos_token_id
    assert [own.count(end) for own in ids] == [1, 1]
    assert ids[0][-1] == end
    assert tokenizer.inner.decode(ids[0][:-1]) == SENTENCE
    task = hub_task(text_folder(tmp_path / "set"), f"data.tokenizer={tmp_path / 'tok'}")
    assert take(task)[0][0].max() < tokenizer.vocab_size


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet", "arrow"])
def test_files_of_ones_own(tmp_path, ending):
    path = tmp_path / f"own.{ending}"
    content = datasets.Dataset.from_dict({"text": [SENTENCE, SENTENCE * 2]})
    if ending == "txt":
        path.write_text(SENTENCE * 3)
    elif ending == "jsonl":
        content.to_json(path)
    elif ending == "parquet":
        content.to_parquet(path)
    else:
        content.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    inputs, _ = take(file_task(path))[0]
    assert bytes(inputs[0].tolist()).decode().strip() in SENTENCE * 3


def test_a_built_in_text_is_read_as_bytes():
    task = make_recipe_task(load_recipe("gpt2_tinystories", "small"))
    assert take(task)[0][0].shape == (16, 64)
    with pytest.raises(ValueError, match="data.kind=builtin_text needs a text, got data.name=dig"):
        take(make_recipe_task(load_recipe("gpt2_tinystories", "small", ["data.name=digits"])))


def test_a_task_comes_back_from_its_settings():
    settings = make_recipe_task(load_recipe("theta_post_ln", "small")).settings
    again = task_of(type(settings).model_validate_json(settings.model_dump_json()))
    assert again.settings == settings


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_variants_share_their_start(family):
    heads = [] if family == "gpt2" else ["model.num_kv_heads=1"]
    task = make_recipe_task(
        load_recipe("gpt2_tinystories", "small", [*TINY, f"model.family={family}", *heads])
    )
    base, own = task.start("softmax", 3), dict(task.start("gate", 3).named_parameters())
    assert all(torch.equal(own[name], value) for name, value in base.named_parameters())
    tokens = torch.randint(300, (2, 7))
    assert task.loss(base, (tokens, tokens)).isfinite()


def test_theta_is_that_of_the_rows(tmp_path):
    task = make_recipe_task(load_recipe("theta_pre_ln", "small"))
    found = task.evaluate(task.start("softmax", 0))
    assert {"theta_median_layer_00", "theta_median_layer_01", "dominant_pct"} <= set(found)
    # nearly uniform at the start, so all rows but the first of each window can be halved
    assert 0.99 < found["theta_median"] <= 1
    peaked = task.start("softmax", 0)
    with torch.no_grad():
        for block in peaked.blocks:
            block.attn.q_proj.weight.mul_(3000)
    assert task.evaluate(peaked)["theta_median"] < found["theta_median"]
    assert task.evaluate(peaked)["dominant_pct"] > found["dominant_pct"]


def test_a_missing_data_set_is_told_with_the_command(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    words = (
        r"cannot open the data set roneneldan/TinyStories \(no network\); with a network run "
        r"python -c \"from datasets import load_dataset; load_dataset\('roneneldan/TinyStories'\)"
    )
    with pytest.raises(FileNotFoundError, match=words):
        take(hub_task("roneneldan/TinyStories"))


def test_a_missing_tokenizer_is_told_with_the_command(tmp_path):
    task = hub_task(text_folder(tmp_path / "set"), f"data.tokenizer={tmp_path}/nowhere")
    with pytest.raises(FileNotFoundError, match="no tokenizer .*T.from_pretrained.*tokenizer=byt"):
        take(task)


def test_remote_code_needs_a_library_that_ran_it(tmp_path):
    with pytest.raises(ValueError, match="data.trust_remote_code needs datasets below 4"):
        take(hub_task(text_folder(tmp_path / "set"), "data.trust_remote_code=true"))


def test_empty_and_short_texts_and_wrong_columns(tmp_path):
    parquet(tmp_path / "empty.parquet", ["", "  ", None])
    with pytest.raises(ValueError, match="must hold text, got none: every document is empty"):
        take(file_task(tmp_path / "empty.parquet"))
    with pytest.raises(ValueError, match="the stream must hold more than model.context_length=7"):
        take(file_task(tmp_path / "empty.parquet", "data.streaming=true"))
    parquet(tmp_path / "short.parquet", ["abc"])
    with pytest.raises(ValueError, match="more than model.context_length=7 tokens, got 4"):
        take(file_task(tmp_path / "short.parquet"))
    with pytest.raises(ValueError, match="data.text_column must be a column of the texts, got "
                       "'body'; valid: text"):  # fmt: skip
        take(file_task(tmp_path / "short.parquet", "data.text_column=body"))
    with pytest.raises(ValueError, match="model.vocab_size must hold every token, got vocab_size="
                       "200, 256 tokens of bytes"):  # fmt: skip
        take(file_task(tmp_path / "short.parquet", "model.vocab_size=200"))


def test_missing_mixed_and_unknown_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file matches data.train=.*: put .txt, .jsonl"):
        take(file_task(tmp_path / "*.txt"))
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "a.csv").write_text(SENTENCE)
    with pytest.raises(ValueError, match=r"must end alike, got \.csv, \.txt"):
        take(file_task(tmp_path / "a.*"))
    with pytest.raises(ValueError, match="unknown ending of text files '.csv'; known: .txt"):
        take(file_task(tmp_path / "a.csv"))


def test_a_broken_file_is_skipped_and_refused_above_1_percent(tmp_path, caplog):
    parquet(tmp_path / "a.parquet", [SENTENCE * 5, *map(str, range(4000))])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 broken")
    assert take(file_task(tmp_path / "*.parquet"))
    assert "skipped a broken file" in caplog.text
    (tmp_path / "b.parquet").write_bytes(b"PAR1 broken" * 1000)
    with pytest.raises(ValueError, match="at most 1% of the bytes may lie in broken files, got"):
        take(file_task(tmp_path / "*.parquet"))


def test_families_refuse_what_they_cannot_have():
    def start(*overrides):
        return make_recipe_task(
            load_recipe("gpt2_tinystories", "small", [*TINY, *overrides])
        ).start("softmax", 0)  # fmt: skip

    with pytest.raises(ValueError, match="gpt2 has one key head for each query head, got num_kv"):
        start("model.num_kv_heads=1")
    with pytest.raises(ValueError, match="qwen2 has no head_dim of its own, got 4"):
        start("model.family=qwen2", "model.head_dim=4")
    with pytest.raises(ValueError, match="model.num_heads must divide model.embed_dim"):
        start("model.num_heads=5")
