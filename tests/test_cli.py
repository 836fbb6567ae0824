"""The command line: exit codes, one-line errors, help with examples, JSON, resuming."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import metadata, version

import pytest
import yaml
from typer.testing import CliRunner

from levelhead import cli, exits
from levelhead.commands import app
from levelhead.harness import compare as compare_module
from levelhead.harness import step_times
from levelhead.options import repeat_options, split_list
from levelhead.variants import VARIANTS

TINY = [
    "compare", "--data", "digits", "--model", "vit(embed_dim=12, num_heads=2, num_layers=1)",
    "--variants", "quest", "--seeds", "2", "--steps", "2", "--workers", "1",
]  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command line in an empty folder; exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEVELHEAD_DEBUG", raising=False)
    monkeypatch.setattr(step_times, "TIMING_ROUNDS", 2)

    def call(*arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_compare_prints_the_table_and_its_reading(run, tmp_path):
    code, out, err = run(*TINY, "--out", "here")
    assert code == 0
    assert "digits: vit with" in out
    assert "quest" in out
    assert "95 % interval" in out
    assert "2 seeds are few" in out
    assert "4 trainings done. Settings, versions, seeds and curves: here/" in out
    assert out.splitlines()[-1] == "As a page: levelhead report here"
    assert "steps" in err
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"config.yaml", "cells.jsonl", "timings.json", "summary.json"}


def test_the_same_command_goes_on(run):
    run(*TINY, "--out", "here")
    code, out, _ = run(*TINY, "--out", "here")
    assert code == 0
    assert "0 trainings done; 4 were there already" in out


def test_json_is_all_that_standard_output_holds(run):
    code, out, _ = run(*TINY, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["folder"].startswith("runs/digits-")
    assert [row["variant"] for row in summary["tasks"][0]["rows"]] == ["softmax", "quest"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "nope"], "unknown variant term 'nope'; known: softmax, off_by_one, sink"),
        (["--variants", "quest + qnorm"], "quest"),
        (["--data", "nope"], "unknown data 'nope'; known: digits, topics"),
        (["--data", "digits/none"], "unknown data 'digits/none'"),
        (["--inits", "nope"], "unknown initializer 'nope'; known: default"),
        (["--model", "resnet"], "unknown model 'resnet'; known: vit, gpt"),
        (["--model", "vit(embed_dim=7)"], "num_heads must divide embed_dim"),
        (["--model", "vit(width=7)"], "unknown option of the model 'width'; known: patch_size"),
        (["--model", "vit(", "--data", "digits"], "is written as name"),
        (["--data", "topics", "--model", "vit"], "topics needs the model gpt, got --model vit"),
        (["--learning-rate", "0"], "learning_rate: Input should be greater than 0"),
        (["--learning-rate", "0", "--recipe", "theta_pre_ln"], "got --learning-rate as well"),
        (["--learning-rate", "1", "--learning-rates", "2"], "either --learning-rate or"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, arguments, words):
    code, out, err = run("compare", *arguments)
    assert code == 2
    assert out == ""
    assert words in last_line(err)
    assert last_line(err).startswith("levelhead: ")
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_data_that_cannot_be_read_is_one_line(run, tmp_path):
    (tmp_path / "folder").mkdir()
    code, _, err = run("compare", "--data", "folder")
    assert code == 2
    assert last_line(err).startswith("levelhead: no train-images-idx3-ubyte")


def test_an_out_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("kept")
    code, _, err = run(*TINY, "--out", "file/run")
    assert code == 2
    assert last_line(err) == "levelhead: Not a directory: file/run"
    assert (tmp_path / "file").read_text() == "kept"


def test_numbers_out_of_range_are_exit_code_2(run):
    assert run("compare", "--seeds", "0")[0] == 2
    assert run("compare", "--steps", "many")[0] == 2
    assert run("nonsense")[0] == 2


def test_the_disk_filling_up_loses_nothing(run, tmp_path, monkeypatch):
    append = compare_module.RunFolder.append

    def full_at_the_second(self, record):
        if self.finished():
            raise OSError(28, "No space left on device", str(self.path / "cells.jsonl"))
        append(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(compare_module.RunFolder, "append", full_at_the_second)
        code, _, err = run(*TINY, "--out", "here")
    assert code == 2
    line = last_line(err)
    assert line.startswith("levelhead: No space left on device: here/cells.jsonl; finished")
    assert "safe in here/" in line
    assert "go on with: levelhead" in line
    assert "3 trainings done; 1 were there already" in run(*TINY, "--out", "here")[1]


def test_ctrl_c_says_how_to_go_on(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compare_module, "train_all", interrupted)
        patched.setattr(sys, "argv", ["levelhead", "compare", "--out", "a b"])
        code, _, err = run(*TINY, "--out", "a b")
    assert code == 130
    assert last_line(err).endswith("safe in a b/; go on with: levelhead compare --out 'a b'")


def test_list_shows_every_variant_and_initializer(run):
    code, out, _ = run("list")
    assert code == 0
    for name in VARIANTS:
        assert name in out
    rows = json.loads(run("list", "variants", "--json")[1])
    assert [row["name"] for row in rows] == list(VARIANTS)
    assert {"equation", "source", "parameters", "neutral", "when", "options"} <= set(rows[0])
    names = [row["name"] for row in json.loads(run("list", "initializers", "--json")[1])]
    assert {"default", "conditioned", "mimetic"} <= set(names)
    assert "conditioned" in run("list", "initializers")[1]
    code, _, err = run("list", "colours")
    assert code == 2
    assert (
        last_line(err)
        == "levelhead: unknown list 'colours'; known: variants, initializers, recipes"
    )


def test_every_command_shows_an_example():
    runner = CliRunner()
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    expected = {
        "compare", "list", "report", "verify", "bench", "diagnose", "train", "plan",
    }  # fmt: skip
    assert set(commands) == expected
    for name in commands:
        shown = runner.invoke(app, [name, "--help"])
        assert shown.exit_code == 0
        assert f"levelhead {name}" in shown.output


def test_bench_hands_its_arguments_on(run, monkeypatch):
    import levelhead.bench.attention as attention_bench

    given = []
    monkeypatch.setattr(attention_bench, "main", lambda argv: given.append(argv) or 0)
    assert run("bench", "attention", "--tokens", "64", "--json")[0] == 0
    assert given == [["--tokens", "64", "--json"]]
    code, _, err = run("bench", "nope")
    assert code == 2
    assert "unknown benchmark 'nope'; known: attention" in last_line(err)
    code, out, _ = run("bench")
    assert code == 2
    assert "Benchmarks: attention" in out
    assert run("bench", "--help")[0] == 0


def test_list_options_take_several_values_in_every_way():
    arguments = ["compare", "--variants", "a", "b(c=1, d=2)", "--seeds", "3", "--data", "x"]
    assert repeat_options(arguments, ("--variants", "--data")) == [
        "compare", "--variants", "a", "--variants", "b(c=1, d=2)", "--seeds", "3", "--data", "x",
    ]  # fmt: skip
    assert repeat_options(["--variants=a", "--variants", "b"], ("--variants",)) == [
        "--variants=a", "--variants", "b",
    ]  # fmt: skip
    assert split_list(["a, b(c=1, d=(2, 3))", "e"]) == ("a", "b(c=1, d=(2, 3))", "e")
    assert split_list(None) == split_list([" , "]) == ()


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"levelhead {version('levelhead')}\n", "")


def test_errors_of_the_program_are_exit_code_1_and_debug_shows_them(run, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(compare_module, "train_all", broken)
    code, _, err = run(*TINY)
    assert code == 1
    expected = "levelhead: failed: RuntimeError: two lines (LEVELHEAD_DEBUG=1 shows where)"
    assert last_line(err) == expected
    with pytest.raises(RuntimeError, match="two"):
        run("--debug", *TINY)
    monkeypatch.setenv("LEVELHEAD_DEBUG", "1")
    with pytest.raises(RuntimeError, match="two"):
        run(*TINY)


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "levelhead.commands")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main(["list"]) == 2
    assert last_line(capsys.readouterr().err) == (
        "levelhead: typer is not installed: pip install 'levelhead[cli]'"
    )


@pytest.mark.parametrize(
    ("module", "extra"), [("PIL", "timm"), ("pandas.core", "report"), ("rich", "cli")]
)
def test_a_missing_module_is_named_with_the_extra_that_brings_it(module, extra):
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    expected = f"{module.split('.')[0]} is not installed: pip install 'levelhead[{extra}]'"
    assert exits.explain(error) == (2, expected)


def test_every_extra_that_is_named_exists():
    assert set(exits.EXTRAS.values()) <= set(metadata("levelhead").get_all("Provides-Extra"))


@pytest.mark.parametrize(
    ("name", "default"), [("compare", "runs/DATA-HASH"), ("train", "runs/train-NAME-HASH")]
)
def test_help_says_where_a_run_is_kept(name, default):
    shown = CliRunner().invoke(app, [name, "--help"]).output
    assert default in re.sub(r"[\s│]+", " ", shown)


def test_explanations_are_one_line():
    assert exits.explain(ValueError("a\n  b")) == (2, "a b")
    assert exits.explain(FileNotFoundError(2, "No such file", "x")) == (2, "No such file: x")
    assert exits.explain(OSError("no errno")) == (2, "no errno")
    code, line = exits.explain(ZeroDivisionError("oh"))
    assert code == 1
    assert line.startswith("failed: ZeroDivisionError: oh")


def test_the_package_is_the_program():
    asked = [sys.executable, "-m", "levelhead", "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    assert version("levelhead") in done.stdout


def heeding_interrupts():
    """A shell that starts the tests in the background has them ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(arguments, folder, **options):
    options.setdefault("preexec_fn", heeding_interrupts)
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from levelhead.cli import main; sys.exit(main())",
         *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def wait_for_lines(path, count):
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no training finished"
        time.sleep(0.1)


def children(process) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    return [int(pid) for pid in listing.stdout.split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


LONG = [*TINY, "--seeds", "200", "--workers", "2", "--out", "here"]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_however_it_is_stopped_nothing_is_lost_and_nothing_is_left(tmp_path, how, code):
    process = start(LONG, tmp_path, start_new_session=True)
    wait_for_lines(tmp_path / "here" / "cells.jsonl", 2)
    workers = children(process)
    assert len(workers) >= 2
    # Ctrl-C reaches the whole group, workers too; a kill only the one process.
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    if how == signal.SIGINT:
        assert last_line(err).startswith(
            "levelhead: stopped; finished trainings are safe in here/"
        )
        assert "Traceback" not in err
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker was left behind"
        time.sleep(0.1)
    kept = (tmp_path / "here" / "cells.jsonl").read_bytes().splitlines()
    for line in kept[:-1]:
        json.loads(line)
    assert len(kept) >= 2


@pytest.mark.slow
def test_a_real_write_error_in_the_middle_is_one_line(tmp_path):
    """A limit on file size is the nearest thing to a full disk that a test can make."""
    limit = 12_000

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start([*LONG, "--workers", "1"], tmp_path, preexec_fn=small_files)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2
    assert last_line(err).startswith("levelhead: File too large: here/cells.jsonl; finished")
    whole = (tmp_path / "here" / "cells.jsonl").read_bytes()
    assert whole.endswith(b"\n")
    assert all(json.loads(line)["final"] for line in whole.splitlines())


def test_a_recipes_comparison_gives_the_numbers_of_its_trainings(run, tmp_path):
    changes = [
        "training.steps=3", "training.warmup_steps=1", "training.batch_size=4",
        "evaluation.max_samples=8", "evaluation.theta_rows=0",
    ]  # fmt: skip
    settings = [part for change in changes for part in ("--set", change)]
    code, out, err = run(
        "compare", "--recipe", "theta_pre_ln", *settings, "--variants", "quest", "--seeds", "2",
        "--workers", "1", "--out", "grid", "--json",
    )  # fmt: skip
    assert code == 0, err
    (task,) = json.loads(out)["tasks"]
    assert (task["steps"], task["metric"]) == (3, "perplexity")
    assert [row["variant"] for row in task["rows"]] == ["softmax", "quest"]
    assert any("--learning-rates" in sentence for sentence in task["reading"])
    code, out, err = run(
        "train", "theta_pre_ln", *changes, "--small", "--variant", "quest", "--seed", "1",
        "--out", "alone", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert task["rows"][1]["values"][1] == json.loads(out)["final"]["perplexity"]
    config = yaml.safe_load((tmp_path / "grid" / "config.yaml").read_text())
    recipe = config["settings"]["tasks"][0]["recipe"]
    assert (recipe["name"], recipe["form"]) == ("synthetic/theta_pre_ln", "small")
    assert any(change.startswith("training.steps=3 (") for change in recipe["changed"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "theta_pre_nl"], "got 'theta_pre_nl'; valid: synthetic/theta_pre_ln"),
        (
            ["--recipe", "theta_pre_ln", "--form", "tiny"],
            "unknown form 'tiny'; known: full",
        ),
        (["--recipe", "theta_pre_ln", "--set", "training.stepps=3"], "key training.stepps; known"),
        (["--recipe", "theta_pre_ln", "--data", "digits"], "got --data as well; valid: --set"),
        (["--set", "training.steps=3"], "--set changes a --recipe"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--workers", "none"], "Invalid value for '--workers'"),
    ],
)
def test_a_recipes_bad_input_is_one_line_and_exit_code_2(run, arguments, words):
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "")
    assert words in last_line(err)
    assert last_line(err).startswith("levelhead: ")


def test_no_command_shows_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "Usage: levelhead" in out + err
    assert "compare" in out + err
    code, _, err = run("compair")
    assert code == 2
    assert last_line(err).startswith("levelhead: No such command 'compair'")
