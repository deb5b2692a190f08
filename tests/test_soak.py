"""The parts of `make soak`, each for as long as fits into seconds, and its result file."""

import json
import random

import pytest

from tests.inputs import Inputs
from tests.kills import Kills
from tests.soak import OUT, PARTS, Tally, fuzz, leaks, threads
from tests.soak_trials import documents, models, options, requests


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", [fuzz, leaks, threads])
def test_a_few_seconds_of_soaking(part):
    counts, following = part(1, 1)
    assert min(counts.values()) > 0 and following == 2


@pytest.mark.parametrize("part", [documents, models, requests, options])
def test_a_second_of_trials(part):
    counts, following = part(1, 1)
    assert next(iter(counts.values())) > 0 and following == 2


def test_bad_inputs_get_one_sentence(tmp_path):
    every = Inputs(tmp_path)
    assert len(every.names) > 2000
    found = {None: 0, "of the command line": 0, "of the API": 0}
    for name in every.names:
        found[every.try_one(name)] += 1
        if min(found["of the command line"], found["of the API"]) > 3:
            return
    raise AssertionError(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["contexts saved", "contexts stored", "policies saved", "trainings", "evaluations", "results collected"]
)
def test_what_is_killed_is_whole_and_goes_on(tmp_path, kind):
    was_killed = Kills(tmp_path, [kind]).kinds[kind](random.Random(1))
    is_endless = kind in ("contexts saved", "contexts stored", "policies saved")
    assert was_killed or not is_endless


def test_counts_add_up_over_several_runs(tmp_path):
    path = tmp_path / "soak.json"
    Tally(path, 5, "make soak").add("kills", {"kills": 7, "trainings": 2}, 6, 1.4)
    tally = Tally(path, 99, "make soak")
    assert (tally.next_seed("kills"), tally.next_seed("fuzz")) == (6, 5)
    tally.add("kills", {"kills": 94, "trainings": 1}, 7, 2.0)
    document = json.loads(path.read_text())
    assert [(row["value"], row["unit"], row["next_seed"]) for row in document["rows"]] == [
        (101, "kills", 7), (3, "trainings", 7)
    ]  # fmt: skip
    path.write_text(json.dumps(document | {"machine": "another"}))
    with pytest.raises(ValueError, match="another machine or other versions"):
        Tally(path, 1, "make soak")


def test_the_committed_counts_tell_of_no_difference():
    files = (OUT, OUT.with_name("soak_trials.json"))  # of two versions of transformers
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    first = {row["part"]: row["value"] for row in reversed(rows)}
    assert first.keys() == PARTS.keys() and all(row["differences"] == 0 for row in rows)
    assert all(first[part] >= PARTS[part][2] for part in PARTS)
