"""Training data downloaded and built into a folder: rows, ratios, bounds, resuming, decontamination."""

import gzip
import json
import random
from types import SimpleNamespace

import pytest

from experiments.data import build as building
from experiments.data.build import DatasetBuilder, build_dataset, describe_dataset, split_samples
from experiments.data.hub import HUB_SOURCES, download_rows
from experiments.data.loom import LOOM_RATIOS, Loom
from lkv.errors import DataError
from lkv.policy.shipped import describe_overlap
from lkv.training.data.documents import ROW_READERS, MultiHopQuestion, ShortQuestion, read_dataset
from lkv.training.data.public_datasets import index_folder, match_dataset
from lkv.training.data.samples import Continuation, Sample
from lkv.training.datasets import BuiltDataset, read_manifest
from lkv.utils.data_files import read_records, split_lines
from tests.commands import main
from tests.experiments.made_sets import Tokens, files, lines_of, prose, rows_of, settings


def build(out, folder, **changes):
    return build_dataset(settings(out, folder, **changes), Tokens(), "words")


def test_a_build_without_one_sample_says_why(folder, tmp_path):
    with pytest.raises(DataError, match=r"no train sample has between 3 and 4 tokens \(candidates: [\d,]+ too long\)"):
        build(tmp_path / "out", folder, recipe="loom-literal", min_tokens=3, max_tokens=4)


def test_ratios_are_the_paper_s():
    assert sum(LOOM_RATIOS.values()) == 100
    for samples in (2000, 23_000, 37):
        loom = Loom({name: [] for name in LOOM_RATIOS}, {}, (2000, 16_000), 0)
        found = split_samples(loom.shares(), samples)
        assert sum(found.values()) == samples
        assert all(abs(found[name] - samples * ratio / 100) < 1 for name, ratio in LOOM_RATIOS.items())


def test_a_build_has_its_ratios_and_bounds_and_is_the_same_twice(tmp_path, folder, capsys):
    for out in ("one", "two"):
        build(tmp_path / out, folder)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    build(tmp_path / "other", folder, seed=1)
    assert files(tmp_path / "one") != files(tmp_path / "other")
    rows = lines_of(tmp_path / "one")
    assert len(rows) == 40 and not (tmp_path / "one" / "progress.json").exists()
    for name, ratio in LOOM_RATIOS.items():
        assert sum(row["source"] == name for row in rows) == round(40 * ratio / 100)
    for row in rows:
        asked = row["continuations"][0]
        ids = len(f"<user> {row['context']}".split())
        # Every answer stands in the assistant's turn, code as well.
        after = len(f"{asked['question']} </user> <assistant> {asked['target']}".split()) + 1
        assert row["tokens"] == ids + after and 200 <= row["tokens"] <= 900
        if row["source"] in ("hotpotqa", "squad"):
            assert asked["target"] in row["context"]
    said = capsys.readouterr().err
    assert "squad: train-v1.1.json" in said
    told = "\n".join(describe_dataset(tmp_path / "one"))
    assert "train-hotpotqa" in told and "30.0%" in told and "CC BY-SA 4.0" in told


def test_held_out_items_are_in_no_training_sample(tmp_path, folder):
    build(tmp_path, folder)
    asked = [
        {tuple(own.values()) for row in lines_of(tmp_path, side) for own in row["continuations"]}
        for side in ("train", "heldout")
    ]
    # One held-out question of TREC makes no long context.
    assert 5 <= len(lines_of(tmp_path, "heldout")) <= 10 and not asked[0] & asked[1]


class Counted:
    """A recipe of numbered samples, which stops a build where it is told to."""

    def __init__(self, stop=None):
        self.stop, self.asked = stop, 0

    def shares(self):
        return {"a": 0.5, "b": 0.5}

    def num_candidates(self, source, wanted):
        return 10 * wanted

    def candidate(self, source, number):
        self.asked += 1
        if self.asked == self.stop:
            raise OSError("out of order")
        return Sample(source, f"{source} {number} " + "word " * (number % 7), (Continuation("what", f"{number}"),))


def build_counted(out, recipe=None, seed=0):
    plan = {"recipe": "counted", "seed": seed}
    return DatasetBuilder(out, plan, Tokens(), (8, 12)).build({"train": (recipe or Counted(), 50)})


def test_a_stopped_build_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "_SHARD_SAMPLES", 8)
    whole = Counted()
    build_counted(tmp_path / "whole", whole)
    for stop in (1, 20, whole.asked - 3):
        out = tmp_path / f"stopped{stop}"
        with pytest.raises(OSError, match="out of order"):
            build_counted(out, Counted(stop))
        if stop > 1:
            with pytest.raises(DataError, match=r"is not finished; run `python -m experiments[.]data build` again"):
                read_manifest(out)
        recipe = Counted()
        build_counted(out, recipe)
        assert files(out) == files(tmp_path / "whole")
        assert stop <= 20 or recipe.asked < whole.asked  # what was there is not made again
    build_counted(tmp_path / "whole", Counted(1))  # a finished build is not made again
    with pytest.raises(DataError, match=r"belongs to a build with other settings \(seed\)"):
        build_counted(tmp_path / "whole", seed=1)
    (tmp_path / "stopped1" / "build.json").unlink()
    (tmp_path / "stopped1" / "progress.json").write_text(
        json.dumps({"plan": {"recipe": "counted", "seed": 0}, "streams": {"x": {"next": 1, "odd": 2}}})
    )
    with pytest.raises(DataError, match="is not the progress of a build; delete it"):
        build_counted(tmp_path / "stopped1")


def test_built_samples_are_read_in_an_order_of_their_own(tmp_path, folder):
    build(tmp_path, folder)
    built = BuiltDataset(tmp_path, seed=3)
    first = [built.sample(i, 1).context for i in range(40)]
    again = [built.sample(i, 1).context for i in range(40, 80)]
    written = [row["context"] for row in lines_of(tmp_path)]
    assert sorted(first) == sorted(again) == sorted(written) and first != again and first != written
    assert first == [BuiltDataset(tmp_path, seed=3).sample(i, 1).context for i in range(40)]
    assert len(built.sample(0, 3).continuations) == 3 and len(built.held_out()) >= 5
    assert built.origins["squad"] == "SQuAD v1.1 train (CC BY-SA 4.0)" and built.max_tokens == 900
    next(tmp_path.glob("train-squad-*.jsonl")).write_text("")
    with pytest.raises(DataError, match="holds 36 of 40 samples; build it again"):
        BuiltDataset(tmp_path)


def test_what_evaluated_texts_hold_is_dropped(tmp_path, folder):
    squad = list(rows_of("squad"))
    (tmp_path / "squad.json").write_text(json.dumps([{"paragraph": row["context"]} for row in squad[:4]]))
    made = build(tmp_path / "out", folder, against=(tmp_path / "squad.json",))
    assert made["sources"]["squad"]["dropped"] == 4 and made["sources"]["hotpotqa"]["dropped"] == 0
    assert set(made["decontamination"]["files"]) == {"squad.json"}
    card = {"decontamination": BuiltDataset(tmp_path / "out").decontamination}
    assert card["decontamination"]["removed"] and card["decontamination"]["sets"]["squad"]["overlapping"] == 4
    assert describe_overlap(card).endswith("and were left out")
    assert describe_overlap({}) == "not compared with evaluated texts"
    for earlier, ending in (
        ({"training": {}}, "were not compared"),
        ({"decontamination": {"removed": False}}, "trained on them"),
    ):
        assert describe_overlap(card | {"started_from": earlier}).endswith(f"; earlier stages of training {ending}")
    text = "".join(row["context"] for row in lines_of(tmp_path / "out"))
    assert not any(row["context"] in text for row in squad[:4]) and any(row["context"] in text for row in squad[4:])


def test_other_columns_are_named(tmp_path, folder):
    data = tmp_path / "data"
    data.mkdir()
    (data / "hotpot_train_v1.1.json").write_text(json.dumps([{"query": "Who?"}]))
    with pytest.raises(DataError, match=r"hotpot_train_v1\.1\.json, entry 1: field 'supporting_facts' is missing"):
        build(tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-tokens", "900", "--max-tokens", "100"], "--min-tokens 900 is not below --max-tokens 100"),
        (["--share", "0"], "--share is 0, but must be greater than 0"),
        (["--recipe", "wide"], "reads a folder of your own; name it with --data"),
        (["--recipe", "wide", "--data", "{parent}"], "would be read as data; give an --out elsewhere"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr("lkv.hf.loading.load_tokenizer", lambda *_: Tokens())
    words = [word.format(parent=tmp_path) for word in words]
    assert main(["data", "build", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_command_builds_and_tells(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr("lkv.hf.loading.load_tokenizer", lambda *_: Tokens())
    out = str(tmp_path / "out")
    words = ["--samples", "20", "--held-out", "5", "--min-tokens", "200", "--max-tokens", "900", "--model", "mine"]
    assert main(["data", "build", "--data", str(folder), "--out", out, *words]) == 0
    first = capsys.readouterr().out
    assert main(["data", "stats", out]) == 0
    assert capsys.readouterr().out == first and "lengths counted" in first
    assert main(["data", "stats", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_the_wide_recipe_is_our_own_mixture(tmp_path, folder):
    sets = tmp_path / "sets"
    sets.mkdir()
    (sets / "train-v1.1.json").write_bytes((folder / "train-v1.1.json").read_bytes())
    (sets / "book.txt").write_text(prose(random.Random(1), 9000))
    for out in ("one", "two"):
        made = build(tmp_path / out, sets, recipe="wide", samples=12, held_out=4)
    assert files(tmp_path / "one") == files(tmp_path / "two") and set(made["sources"]) == {"squad", "text", "python"}
    assert all(200 <= row["tokens"] <= 900 and len(row["continuations"]) >= 2 for row in lines_of(tmp_path / "one"))
    assert made["sources"]["python"]["licence"] == "PSF" and made["sources"]["python"]["items"] > 100
    (sets / "book.txt").write_text(prose(random.Random(2), 9000))
    with pytest.raises(DataError, match="other settings"):
        build(tmp_path / "one", sets, recipe="wide", samples=12, held_out=4)


@pytest.mark.parametrize("name", LOOM_RATIOS)
def test_the_hub_s_rows_and_the_official_files_are_the_same_items(name, folder):
    every = [path for path in folder.rglob("*") if path.is_file()]
    found = [path for path in every if match_dataset(path.relative_to(folder)) == name]
    local = read_dataset(name, found, folder)
    streamed = list(ROW_READERS[name]((str(i), row) for i, row in enumerate(rows_of(name))))
    assert local[: len(streamed)] == streamed and len(streamed) == (15 if name == "narrativeqa" else 30)
    if name == "trec":
        assert local[-1] == ShortQuestion("café ?", "DESC:def", "TREC") and len(local) == 31
    if name == "multi_news":
        assert "NEWLINE_CHAR" not in local[0].text and "|||||" not in local[0].text
        assert not local[0].questions[0][1].startswith("\u2013")
    if name == "hotpotqa":
        assert isinstance(local[0], MultiHopQuestion) and local[0].needed == {1, 2}


def test_separators_inside_a_line_do_not_end_it(tmp_path):
    (tmp_path / "train.src.cleaned").write_text("a b\u2028c ||||| d\r\nx\x0by ||||| z\n", newline="")
    (tmp_path / "train.tgt").write_text("\u2013 one\n\u2013 two\x85more\n")
    items = read_dataset("multi_news", [tmp_path / "train.src.cleaned"], tmp_path)
    for path in (tmp_path / "train.src.cleaned", tmp_path / "train.tgt"):  # and gzipped
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = index_folder(tmp_path)
    assert found.used == {"multi_news": [tmp_path / "train.src.cleaned.gz"]}
    assert found.skipped == {tmp_path / "train.tgt.gz": "read with its source file"}
    assert read_dataset("multi_news", found.used["multi_news"], tmp_path) == items
    texts = [(item.text, item.questions[0][1]) for item in items]
    assert texts == [("a b\u2028c\n\nd", "one"), ("x\x0by\n\nz", "two\x85more")]
    assert split_lines("") == [] and split_lines("a\n\nb") == ["a", "", "b"]


class Stream(list):
    """Rows as `datasets` streams them, breaking after some."""

    def __init__(self, rows, stop=None):
        super().__init__(rows)
        self.stop = stop

    def __iter__(self):
        for i, row in enumerate(super().__iter__()):
            if i == self.stop:
                raise ConnectionError("the line went dead")
            yield row


def test_a_fetch_goes_on_where_it_broke_and_takes_named_splits_alone(tmp_path):
    asked = []

    def load(repository, stop=None, **options):
        asked.append((repository, options))
        return Stream(rows_of("mmlu", 40), stop)

    with pytest.raises(
        DataError,
        match=r"MMLU auxiliary_train and dev cannot be downloaded from cais/mmlu .* went dead.* all/auxiliary_train",
    ):
        download_rows("mmlu", tmp_path, 60, load=lambda *a, **o: load(*a, stop=25, **o))
    path, commit = download_rows("mmlu", tmp_path, 60, load=load)
    assert commit == HUB_SOURCES["mmlu"].revision and len(commit) == 40
    assert [options["split"] for _, options in asked] == ["auxiliary_train", "auxiliary_train", "dev"]
    assert all(o == {"split": o["split"], "name": "all", "revision": commit, "streaming": True} for _, o in asked)
    drawn, every = [row for _, row in read_records(path)], list(rows_of("mmlu", 40))
    assert drawn[:30] == drawn[30:] and [every.index(row) for row in drawn[:30]] != list(range(30))
    assert download_rows("mmlu", tmp_path, 60, load=None)[0] == path  # nothing is fetched again
    path, _ = download_rows("the_stack", tmp_path, 8, load=lambda *a, **o: Stream(rows_of("the_stack")))
    assert all(
        set(row) == {"content", "max_stars_repo_path", "max_stars_repo_licenses", "lang"}
        for _, row in read_records(path)
    )
    path, _ = download_rows("narrativeqa", tmp_path, 20, load=lambda *a, **o: Stream(rows_of("narrativeqa")))
    stories = [row["document"] for _, row in read_records(path)]
    first = [story["id"] not in {other["id"] for other in stories[:n]} for n, story in enumerate(stories)]
    assert [bool(story["text"]) for story in stories] == first and 10 <= sum(first) < len(stories) == 20


def test_a_build_from_the_hub_alone_goes_on_with_its_settings_alone(tmp_path, monkeypatch):
    names = {hub.repository: name for name, hub in HUB_SOURCES.items()}
    monkeypatch.setattr(building, "_SHARD_SAMPLES", 4)
    monkeypatch.setattr(building, "_MIN_ROWS", 10)
    head = SimpleNamespace(dataset_info=lambda repository, revision: SimpleNamespace(sha="a" * 40))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: head)  # of the hub's own conversions

    def run(out, **changes):
        def load(repository, **options):
            assert options["streaming"] and len(options["revision"]) == 40
            return Stream(rows_of(names[repository], 200))

        return build_dataset(settings(tmp_path / out, None, **changes), Tokens(), "words", load)

    make_candidate = Loom.candidate

    def stop(self, source, number):
        if number == 6:
            raise OSError("out of order")
        return make_candidate(self, source, number)

    made = run("whole")
    assert made["sources"]["multi_news"]["commit"] == "a" * 40 and len(lines_of(tmp_path / "whole")) > 30
    assert made["sources"]["squad"]["from"].startswith("rajpurkar/squad at 7b6d24c4")
    with monkeypatch.context() as patch:
        patch.setattr(Loom, "candidate", stop)
        with pytest.raises(OSError, match="out of order"):
            run("stopped")
    fetched = files(tmp_path / "stopped" / "fetched")
    with pytest.raises(DataError, match=r"progress\.json belongs to a build with other settings \(asked\)"):
        run("stopped", samples=400)
    assert files(tmp_path / "stopped" / "fetched") == fetched
    run("stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
