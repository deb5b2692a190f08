"""The preflight of experiments/runs/: every missing input is named, and nothing where all is there."""

import argparse
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError
from transformers import AutoModelForCausalLM

from experiments.runs import preflight, rehearse
from lkv.cli.doctor import BAD, Finding
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy


class Hub:
    """A hub that lets nobody read what `refused` names, or cannot be reached."""

    def __init__(self, refused=(), is_down=False):
        self.refused, self.is_down = refused, is_down

    def auth_check(self, repository, repo_type):
        if self.is_down:
            raise ConnectionError("no network")
        if repository in self.refused:
            raise GatedRepoError.__new__(GatedRepoError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    rehearse.make_data(folder)
    rehearse.make_model("llama", folder / "llama")
    return folder


@pytest.fixture
def given(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "examine", lambda: [])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    book = folder / "book.txt"
    paths = {name: folder / name for name in ("ruler", "longbench", "data")}
    return argparse.Namespace(
        model=str(folder / "llama"), out=tmp_path / "out", text=book, pattern=book, launch=["python"], tokens=4096,
        processes=1, policy=None, **paths,
    )  # fmt: skip


def test_nothing_is_missing_where_all_is_there(given):
    assert list(preflight.problems(given, Hub(is_down=True))) == []
    assert not given.out.exists()


def test_all_that_is_missing_is_named_at_once(given, monkeypatch, capsys):
    for name in ("text", "pattern", "ruler", "data"):
        setattr(given, name, None)
    given.longbench, given.launch = given.out / "none", ["python", "no-such-program"]
    monkeypatch.setattr(preflight, "examine", lambda: [Finding("Soft-TopK", BAD, "differs by 1", "report it")])
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    found = list(preflight.problems(given, Hub(["bigcode/the-stack-dedup"])))
    for part in (
        "there is no program 'no-such-program'", "Soft-TopK differs by 1; report it", "TEXT: not set",
        "PATTERN: not set", "hides its needles in essays", "qasper: ", "The Stack (Python, Java, C++, C#) is not in",
        "its terms must be accepted on the hub", "no GPU is seen",
    ):  # fmt: skip
        assert sum(part in problem for problem in found) == 1, (part, found)
    monkeypatch.setattr(preflight, "HfApi", lambda: Hub(is_down=True))
    words = ["--model", given.model, "--out", str(given.out), "--longbench", str(given.longbench)]
    assert preflight.main(words) == 1
    said = capsys.readouterr().err
    assert "HotpotQA train is not in the folder" in said and said.endswith("put right first; nothing was started.\n")


def test_a_model_that_may_not_be_read_and_a_machine_that_is_too_small_are_named(given, monkeypatch, tmp_path):
    gpu = SimpleNamespace(total_memory=2**20)
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(preflight.torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    given.pattern = tmp_path / "heads.tsv"
    given.pattern.write_text("0.5\t0.5\n")
    small, disk, pattern = sorted(preflight.problems(given, Hub()))
    assert "GPU 0 has 0 GiB, but about 0 are needed" in small and "1 GiB free, but about 7 are needed" in disk
    assert "heads.tsv" in pattern and "layers" in pattern
    given.processes, given.pattern = 10**9, given.text
    # The files are read into the GPUs, whatever the number of processes.
    assert not any("of memory" in problem for problem in preflight.problems(given, Hub()))
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    assert any("1000000000 processes load 0 GiB" in problem for problem in preflight.problems(given, Hub()))
    given.model = "meta-llama/some"
    (refused,) = preflight.problems(given, Hub(["meta-llama/some"]))
    assert refused.startswith("MODEL: meta-llama/some cannot be read (its terms must be accepted")


def test_a_policy_that_the_tables_cannot_use_is_named(given, tmp_path):
    """POLICY, in place of the one that the scripts train."""
    given.policy = str(tmp_path / "none")
    (missing,) = preflight.problems(given, Hub())
    assert missing.startswith("POLICY: ") and "there is no policy folder" in missing
    given.policy = "smollm2-135m-instruct"
    (other,) = preflight.problems(given, Hub())
    assert "is for a model of 30 layers, 3 KV heads and head dimension 64, but" in other and "has 2, 2 and 16" in other
    Policy(inspect_model(AutoModelForCausalLM.from_pretrained(given.model))).save_pretrained(tmp_path / "policy")
    given.policy = str(tmp_path / "policy")
    assert list(preflight.problems(given, Hub())) == []
