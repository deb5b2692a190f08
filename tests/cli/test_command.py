"""Options derived from the fields of the commands, and the listings of methods and policies."""

import json
import os
import sys

import pytest

from lkv.cli.command import Command
from lkv.cli.main import COMMANDS, find_command
from lkv.errors import PolicyMismatchError
from lkv.methods.registry import METHODS
from lkv.policy.lookup import default_policy
from lkv.training.config import SETTINGS
from tests.commands import PROGRAMS, main, parse_arguments
from tests.conftest import save_model
from tests.families import tiny_gpt2

LOADING = ("ask", "eval", "inspect", "profile", "serve", "train")  # commands that load a model


def commands() -> list[tuple[str, type[Command]]]:
    found = []
    for name in (*COMMANDS, *PROGRAMS):
        command = PROGRAMS[name]["command"] if name in PROGRAMS else find_command(name)
        parts = command.items() if isinstance(command, dict) else [("", command)]
        found += [(f"{name} {action}".strip(), part) for action, part in parts]
    return found


@pytest.mark.parametrize(("name", "command"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_field_is_an_option_with_help(name, command, capsys):
    with pytest.raises(SystemExit):
        parse_arguments([*name.split(), "--help"])
    output = capsys.readouterr().out
    for key, field in command.model_fields.items():
        assert field.description, key
        option = (field.alias or key).replace("_", "-")
        assert (
            (field.json_schema_extra or {}).get("positional") or f"--{option}" in output or f"--no-{option}" in output
        ), key


@pytest.mark.parametrize("name", LOADING)
def test_commands_that_load_a_model_take_its_device(name):
    required = {"eval": ["ruler", "--out", "x"], "train": ["--data", "x", "--out", "x"]}.get(name, [])
    assert parse_arguments([name, *required]).device is None
    assert parse_arguments([name, *required, "--device", "cuda:1", "--dtype", "bfloat16"]).device == "cuda:1"


def test_training_options_are_the_settings():
    options = parse_arguments(
        "train --data x --out x --warmup-contexts 3 --no-position --lr 1e-2 --key unrotated".split()
    )
    changed = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    assert changed == {"warmup_contexts": 3, "position": False, "lr": 0.01, "key": "unrotated"}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("ask x.txt q --retenton 0.1", "did you mean --retention? `lkv ask --help` lists what it takes"),
        ("data build --sampels 3 --out x --recipe loom", "did you mean --samples? `python -m experiments.data build -"),
        (
            "fit --model x",
            "unrecognized arguments: --model; did you mean MODEL without --model? `lkv fit --help` lists",
        ),
        ("policies tiny", "unrecognized arguments: tiny; `lkv policies --help` lists"),
    ],
)
def test_unknown_options_are_named_with_the_one_that_was_meant(line, hint, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(line.split())
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_methods_fit_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["methods"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_a_pipe_gets_all_names_of_papers(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "__stdout__", stdout)  # whose terminal has a width
        assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and all(spec.paper in printed for spec in METHODS.values())


def test_one_method_is_described_in_full(capsys):
    assert main(["methods", "duo+compensation"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a pattern of retrieval heads, queries" in output and "https://arxiv.org/abs/2410.10819" in output
    assert main(["methods", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [method["name"] for method in described] == list(METHODS) and described[0]["needs"] == ["a policy"]
    assert main(["methods", "snapvk"]) == 2 and "did you mean 'snapkv'" in capsys.readouterr().err


def test_policies_list_what_is_shipped_and_the_alternatives(capsys):
    assert main(["policies"]) == 0
    output = capsys.readouterr().out
    # Two values in two bytes for each of 64 channels, in 3 heads of 30 layers.
    assert "1,000 tokens take 23.0 MB uncompressed in 16 bits, 3.5 MB at R 0.15" in output


def test_a_model_that_cannot_be_fitted_is_not_sent_to_fit(tmp_path, capsys):
    model = tiny_gpt2()
    with pytest.raises(PolicyMismatchError, match=r"this model .* makes none: GPT2LMHeadModel has no rotary embedding"):
        default_policy(model)
    model.save_pretrained(save_model(tmp_path))
    assert main(["policies", "--model", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "  fit       GPT2LMHeadModel has no rotary embedding that LKV can undo" in output
    assert "lkv fit" not in output


def test_the_alternatives_for_a_model_without_a_policy_are_listed(tmp_path, capsys):
    folder = save_model(tmp_path / "tiny")
    assert main(["policies", "--model", str(folder)]) == 0
    output = capsys.readouterr().out
    assert f"There is no policy for {folder} (LlamaForCausalLM, 3 layers of 2 KV heads)." in output
    assert "snapkv, pyramidkv" in output and f"`lkv fit {folder} --minutes 10`" in output
    shape = json.loads((folder / "config.json").read_text())
    nbytes = 1000 * 2 * 4 * shape["head_dim"] * shape["num_key_value_heads"] * shape["num_hidden_layers"]
    assert f"1,000 tokens take about 1 s here, and {nbytes / 1e6:.1f} MB uncompressed in float32" in output
