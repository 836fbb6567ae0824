"""The benchmark of whole models runs small, and its record says what it must."""

import json

import pytest

from levelhead.bench import models
from levelhead.bench.model_cases import TINY as TINY_CASES
from levelhead.bench.models import bar, main
from levelhead.convert import convert

TINY = ["--tiny", "--repeats", "1", "--seconds", "0"]


def test_small_run_writes_ratios_refusals_and_the_time_of_a_conversion(tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--models", "vit_b", "swin", "--variants", "quest", "affine + precondition"]
    assert main([*TINY, *arguments, "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record["models"]) == ["vit_b", "swin"]
    for measured in record["models"].values():
        assert list(measured["rows"])[0] == "stock"
        assert measured["rows"]["quest"]["converted"] > measured["rows"]["quest"]["left"] == 0
        for row in measured["rows"].values():
            assert row["throughput_min"] <= row["throughput"] <= row["throughput_max"]
            assert 0.5 < row["memory"] < 2
            assert row["rounds"] == 1
    assert set(record["conversion_s"]) == {"quest", "affine + precondition"}
    assert "vit_b    quest" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_with_what_it_has(tmp_path, capsys, monkeypatch):
    path, arguments = tmp_path / "record.json", ["--variants", "quest", "--json", *TINY]
    measure = models.measure_model
    asked = []

    def measure_until(stock, *rest):
        asked.append(type(stock).__name__)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(stock, *rest)

    monkeypatch.setattr(models, "measure_model", measure_until)
    arguments += ["--models", "gpt2", "xcit", "--out", str(path)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    first = json.loads(path.read_text())
    assert list(first["models"]) == ["gpt2"]
    assert main(arguments) == 0
    assert asked == ["GPT2LMHeadModel", "Xcit", "Xcit"]
    record = json.loads(capsys.readouterr().out)
    assert record["models"]["gpt2"] == first["models"]["gpt2"]
    assert list(record["models"]) == ["gpt2", "xcit"]
    assert json.loads(path.read_text()) == record
    main([*arguments, "--repeats", "2", "--models", "xcit"])  # other settings: anew
    assert list(json.loads(path.read_text())["models"]) == ["xcit"]


def test_copies_share_weights_and_only_the_copy_is_converted():
    stock = TINY_CASES["xcit"].build()
    copy = models.shared_copy(stock)
    convert(copy, "gate", start="paper")
    theirs = dict(copy.named_parameters())
    assert all(theirs[name] is parameter for name, parameter in stock.named_parameters())
    assert not any("levelhead" in name for name, _ in stock.named_modules())


def test_what_misses_its_bar_is_marked():
    row = {"interval": [0.9, 1.0], "rounds": 3}
    rows = {"stock": row | {"throughput": 0.9, "memory": 1.0},
            "quest": row | {"throughput": 0.94, "memory": 1.04},
            "affine": row | {"throughput": 0.94, "memory": 1.02}}  # fmt: skip
    record = {"threads": 2, "models": {"gpt2": {"rows": rows}}, "conversion_s": {"quest": 0.5}}
    lines = models.table(record).splitlines()
    assert lines[2].endswith("1.000")  # the control is asked nothing
    assert lines[3].endswith("1.040   misses: throughput, memory")
    assert lines[4].endswith("1.020")


def test_unknown_models_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["--models", "alexnet"])
    assert "vit_b" in capsys.readouterr().err


def test_bars_are_those_asked_for():
    assert (bar("vit_b", "quest"), bar("gpt2", "affine"), bar("swin", "quest")) == (0.95, 0.93, 1)
    assert bar("vit_b", "softmax") is None
