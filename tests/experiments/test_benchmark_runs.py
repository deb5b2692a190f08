"""Runs of benchmarks: resumed on the same files and versions alone."""

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments import common, fit
from experiments.common import Subject
from lkv.errors import DataError
from lkv.hf.attention import patch_attention
from lkv.policy.policy import Policy
from lkv.utils import provenance
from lkv.utils.provenance import collect_provenance
from tests.conftest import tiny_llama


@pytest.mark.parametrize("changed", ["data", "versions", "details"])
def test_an_interrupted_benchmark_resumes_on_the_same_files_and_versions_alone(tmp_path, monkeypatch, changed):
    data, measured = tmp_path / "data", []
    data.mkdir()
    (data / "texts.txt").write_text("one")
    options = argparse.Namespace(out=tmp_path / "some.json", data=data, seed=0)

    def run(details=None):
        common.run_cases(
            "experiments.some", options, "some", {"a": (1,), "b": (2,)}, measure, lambda samples: [*samples.values()],
            SimpleNamespace(digest=lambda: "p"), details={"fits": "x"} | (details or {}),
        )  # fmt: skip

    def measure(case):
        measured.append(case)
        if measured == [1, 2]:
            raise KeyboardInterrupt
        if len(measured) == 3:  # packages that go during a run
            monkeypatch.setattr(provenance, "_version", lambda package: "absent")
        return {"value": case}

    versions = collect_provenance()["versions"]
    with pytest.raises(KeyboardInterrupt):
        run()
    other = {}
    with monkeypatch.context() as patch:
        if changed == "data":
            (data / "texts.txt").write_text("another")
        elif changed == "versions":
            patch.setattr(common, "collect_provenance", lambda: {"versions": {"torch": "0"}})
        else:
            other = {"fits": "y"}
        with pytest.raises(DataError, match="samples of other settings"):
            run(other)
    (data / "texts.txt").write_text("one")
    run()
    document = json.loads(options.out.read_text())
    assert measured == [1, 2, 2] and document["rows"] == [{"value": 1}, {"value": 2}]
    assert (document["policy"], document["fits"], document["versions"]) == ("p", "x", versions)


def test_a_fit_is_taken_again_only_with_the_settings_that_it_was_made_with(tmp_path, monkeypatch):
    made, spec = [], patch_attention(tiny_llama()).spec

    def stub(model, tokenizer, minutes, out, name, **data):
        made.append((minutes, sorted(data)))
        Policy(spec).save_pretrained(out)
        return Policy.from_pretrained(out)

    monkeypatch.setattr(fit.fitting, "fit", stub)
    for name in ("data", "train", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.txt").write_text(name)
    subject = Subject(None, None, None, "owner/Tiny")

    def fitted(kind, **changed):
        options = {"threads": 1, "dtype": "bfloat16", "train": tmp_path / "train", "data": tmp_path / "data"}
        options |= {"work": tmp_path / "work"} | changed
        return fit.fitted(subject, kind, SimpleNamespace(**options))

    first = fitted("clean:5")
    assert fitted("clean:5").digest() == first.digest() and made == [(5.0, ["against", "data"])]
    for what, changed in (
        ("threads", {"threads": 2}), ("dtype", {"dtype": "float32"}), ("texts", {"train": tmp_path / "more"}),
        ("evaluated texts", {"data": tmp_path / "more"}),
    ):  # fmt: skip
        if "texts" in what:
            (tmp_path / "more" / "texts.txt").write_text("longer than it was")
        with pytest.raises(DataError, match=rf"tiny-clean-5 was fitted with other {what}; give another --work"):
            fitted("clean:5", **changed)
    monkeypatch.setattr(fit, "RECIPE", replace(fit.RECIPE, lr=1.0))
    with pytest.raises(DataError, match="was fitted with other recipe; give"):
        fitted("clean:5")
    (tmp_path / "work" / "tiny-clean-5.json").unlink()
    with pytest.raises(DataError, match="was fitted with unknown settings; give"):
        fitted("clean:5")
    with pytest.raises(DataError, match="name it with --train"):
        fitted("clean:1", train=None)
    # Without texts of its own a fit does not depend on --train; the mixture is compared with nothing.
    fitted("none:1")
    fitted("none:1", train=None)
    fitted("mixture:1")
    fitted("mixture:1", data=tmp_path / "more")
    assert [minutes for minutes, _ in made] == [5.0, 1.0, 1.0]
