"""The benchmark of whole models runs small, and its record says what it must."""

import json

import pytest

from levelhead.bench.models import bar, main


def test_small_run_writes_ratios_refusals_and_the_time_of_a_conversion(tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--tiny", "--models", "vit_b", "xcit", "--variants", "quest", "affine"]
    assert main([*arguments, "--repeats", "1", "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record["models"]) == ["vit_b", "xcit"]
    for rows in record["models"].values():
        for row in rows.values():
            assert row["throughput_min"] <= row["throughput"] <= row["throughput_max"]
            assert 0.5 < row["memory"] < 2
    assert set(record["conversion_s"]) == {"quest", "affine"}
    assert "vit_b    quest" in capsys.readouterr().out


def test_windows_run_too(capsys):
    main(["--tiny", "--models", "swin", "--variants", "qknorm_ds", "--repeats", "1", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert "throughput" in record["models"]["swin"]["qknorm_ds"]


def test_unknown_models_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["--models", "alexnet"])
    assert "vit_b" in capsys.readouterr().err


def test_bars_are_those_asked_for():
    assert (bar("vit_b", "quest"), bar("gpt2", "affine"), bar("swin", "quest")) == (0.95, 0.93, 1)
    assert bar("vit_b", "softmax") is None
