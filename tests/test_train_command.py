"""``levelhead train``: what it prints, its exit codes, and what other commands make of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from levelhead.cli import main
from levelhead.harness.engine.log import read_events

TINY = ["--small", "batch_size=8", "model.embed_dim=12", "model.num_heads=2", "model.num_layers=1"]


def levelhead(*arguments):
    """Run a command in this process."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        return exit_.code or 0


def test_the_embedded_default_trains_and_says_what_it_did(tmp_path, capsys):
    out = tmp_path / "run"
    assert levelhead("train", *TINY, "--steps", 4, "--seed", 3, "--out", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seed"], found["variant"], found["task"]) == (3, "softmax", "digits")
    assert found["curve"]["step"] == [1, 2, 3, 4]
    assert found["folder"] == str(out)
    settings = yaml.safe_load((out / "config.yaml").read_text())["settings"]["tasks"][0]
    assert (settings["steps"], settings["batch_size"]) == (4, 8)
    assert levelhead("train", *TINY, "--steps", 4, "--seed", 3, "--out", out, "--resume") == 0
    said = capsys.readouterr()
    assert "digits: vit with" in said.out
    assert "% of it waiting for data" in said.out
    assert "this training is finished; nothing was left to do" in said.err


def test_diagnose_and_report_read_what_was_trained(tmp_path, capsys):
    out = tmp_path / "run"
    options = ("--variant", "quest", "--monitor", 2, "--out", out, "--json")
    assert levelhead("train", *TINY, "data=topics", "--steps", 4, *options) == 0
    assert any(event["event"] == "scalars" for event in read_events(out / "metrics.jsonl"))
    capsys.readouterr()
    assert levelhead("diagnose", out, "--jacobian-tokens", 0) in (0, 1)
    assert "weights after step 4 (step-00000004)" in capsys.readouterr().out
    assert levelhead("report", out) == 0
    page = (out / "report.html").read_text()
    assert "Attention while training" in page
    assert "entropy_nats, largest head" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs a recipe, or --small for the embedded default"),
        (["--small", "stepps=3"], "unknown override 'stepps'; known: data, model.<option>, steps"),
        (["--small", "data=nothing"], "unknown data 'nothing'"),
        (["--small", "data=[1"], "the value of override 'data=[1' is not YAML"),
        (["--small", "=3"], "an override must be key=value with a dotted key, got '=3'"),
        (["--small", "steps=-1"], "steps: Input should be greater than or equal to 1"),
        (["--small", "--variant", "qest"], "unknown variant term 'qest'"),
        (["--small", "--init", "zeros"], "unknown initializer 'zeros'"),
        (["--small", "--tracker", "mlfow"], "unknown tracker 'mlfow'"),
        (["--small", "--shard", "--steps", "1"], "sharding needs several processes"),
        (["no_such_recipe"], "got 'no_such_recipe'; valid: language/affine_0_5b, "),
        (["vit_b_imagnet"], "got 'vit_b_imagnet'; valid: vision/vit_b_imagenet"),
        (["--small", "--steps", "0"], "Invalid value for '--steps'"),
        (["--small", "--seed", "-1"], "Invalid value for '--seed'"),
        (["--small", "--sed", "1"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    assert levelhead("train", *arguments, "--out", tmp_path / "run") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("levelhead: ")
    assert words in line
    assert "\u2500" not in line  # no frame around it
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverges_ends_with_exit_code_1(tmp_path, capsys):
    wild = ["learning_rate=1e30", "clip_norm=1e30", "--steps", 6, "--out", tmp_path / "run"]
    assert levelhead("train", *TINY, *wild) == 1
    assert "diverged at step" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_the_command_that_goes_on(tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "import sys; from levelhead.cli import main; sys.exit(main())",
    ]
    given = ["train", *TINY, "--steps", "100000", "--save-every", "90000", "--out", str(out)]
    process = subprocess.Popen([*command, *given], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(2)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    line = said.strip().splitlines()[-1]
    (checkpoint,) = (out / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert line.startswith(f"levelhead: stopped; step {step} is saved in {out}/; go on with: ")
    assert line.endswith("--resume")


@pytest.mark.slow
def test_torchrun_starts_it_on_two_processes(tmp_path):
    out, scripts = tmp_path / "run", Path(sys.executable).parent
    command = [
        str(scripts / "torchrun"), "--standalone", "--no-python", "--nproc-per-node", "2",
        str(scripts / "levelhead"), "train", *TINY, "--steps", "3", "--out", str(out), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["num_processes"] == 2


def test_a_folder_is_looked_at_before_the_model_is_built(tmp_path, capsys, monkeypatch):
    """--resume is advised where it would go on, and nowhere else."""
    out = tmp_path / "run"
    assert levelhead("train", *TINY, "--steps", 2, "--out", out) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()

    def must_not_build(*arguments):
        raise AssertionError("built")

    monkeypatch.setattr("levelhead.harness.engine.engine.start_model", must_not_build)
    capsys.readouterr()

    def said(*arguments):
        assert levelhead("train", *TINY, *arguments) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    same = said("--steps", 2, "--out", out)
    assert same.endswith("valid: --resume, to go on with it, or another --out")
    for resume in ((), ("--resume",)):
        other = said("--steps", 3, "--out", out, *resume)
        assert "holds another training: steps was 2, not 3" in other
        foreign = said("--steps", 2, "--out", tmp_path / "other", *resume)
        assert ("a folder with other files; valid: another --out" in foreign) == (not resume)
        assert ("must hold the config.yaml of a training, got none" in foreign) == bool(resume)
        assert "--resume" not in other + foreign


def test_a_tracker_without_a_login_is_one_line_and_leaves_no_training(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    out = tmp_path / "run"
    command = [
        sys.executable, "-c", "import sys; from levelhead.cli import main; sys.exit(main())",
        "train", *TINY, "--steps", "2", "--tracker", "wandb", "--out", str(out),
    ]  # fmt: skip
    nobody = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=tmp_path,
        env=nobody | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("levelhead: W&B cannot start: ")
    assert line.endswith("WANDB_API_KEY=KEY, WANDB_MODE=offline, or no --tracker wandb")
    assert not (out / "config.yaml").exists()


RECIPE = [
    "theta_pre_ln", "--small", "training.steps=5", "training.warmup_steps=1",
    "training.batch_size=4", "evaluation.max_samples=8", "evaluation.theta_rows=0",
    "--variant", "affine", "--micro-batch-size", "2", "--json",
]  # fmt: skip


@pytest.mark.slow
def test_accelerate_starts_a_recipe_on_two_processes_with_the_numbers_of_one(
    tmp_path, capsys, free_port
):
    scripts = Path(sys.executable).parent
    launcher = [
        str(scripts / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", str(free_port), "--no_python",
    ]  # fmt: skip
    command = [*launcher, str(scripts / "levelhead"), "train", *RECIPE, "--out", tmp_path / "two"]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads(done.stdout)
    assert levelhead("train", *RECIPE, "--out", tmp_path / "one") == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    assert one["hash"] == two["hash"]
    assert two["curve"]["train_loss_nats"] == pytest.approx(
        one["curve"]["train_loss_nats"], rel=1e-4
    )
    assert len(set(one["curve"]["train_loss_nats"])) == 5
    for name, value in one["final"].items():
        assert two["final"][name] == pytest.approx(value, rel=1e-3), name
