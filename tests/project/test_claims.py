"""The page Claims: every figure from a result file, every verdict from the figures."""

import json
import re

import pytest

from experiments import claims, tables
from experiments.claims import CLAIMS, claims_page, deviations, figures_of, read_figure, verdict
from experiments.readme import CLAIMS_PAGE, ROOT

EVERY = json.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]
_NO_FIGURES = r"\{[^}]*\}|R = [\d.]+|\d+ bits|SmolLM2-135M|Qwen2\.5-Coder-0\.5B|Llama-3\.1-8B|2WikiMultihopQA|13-grams"


def test_the_page_is_written_from_the_files():
    assert CLAIMS_PAGE.read_text(encoding="utf-8") == claims_page()


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: re.sub(r"\W+", "-", claim["claim"])[:50])
def test_no_figure_is_typed_and_every_verdict_has_its_ground(claim):
    assert sum(kind in claim for kind in ("holds", "takes", "tests")) == 1
    assert not re.search(r"\d", re.sub(_NO_FIGURES, "", claim.get("evidence", "")))
    named = set(re.findall(r"\w+", " ".join(claim.get("holds", ())))) - {"0"}
    assert set(figures_of(claim)) <= named | set(re.findall(r"\{(\w+)", claim.get("evidence", "")))
    assert verdict(claim) == claims.HELD or {"remark", "takes", "tests"} & set(claim)
    assert all((ROOT / path).is_file() for path in claim.get("tests", ()))


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (["low < high"], claims.HELD),
        (["high > 0.4 wide", "low < wide"], claims.UNCLEAR),
        (["low < high", "high < low"], claims.PARTLY),
        (["low > high", "wide < 1.5 low"], claims.NOT_HELD),
        (["wide < low"], claims.UNCLEAR),
        (["low < high", "wide < low"], claims.UNCLEAR),
        (["once < low"], claims.UNCLEAR),
        (["once > low"], claims.NOT_HELD),
        (["counted < low"], claims.HELD),
        (["high > 1", "low > 0"], claims.HELD),
        (["low > 1"], claims.UNCLEAR),
        (["high > 3"], claims.NOT_HELD),
        (["wide > 1"], claims.UNCLEAR),
    ],
)
def test_a_verdict_follows_from_values_and_intervals(tmp_path, monkeypatch, holds, expected):
    rows = [
        {"method": "low", "value": 1.0, "low": 0.9, "high": 1.1, "unit": "score, 0 to 100"},
        {"method": "high", "value": 2.0, "low": 1.9, "high": 2.1, "unit": "nats"},
        {"method": "wide", "value": 2.0, "low": 0.5, "high": 6.0, "kl": 0.25, "unit": "nats"},
        {"method": "once", "value": 0.5, "low": 0.5, "high": 0.5, "n": 1, "unit": "seconds"},
        {"method": "counted", "value": 0.5, "n": 1, "unit": "ratio of bytes"},
    ]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    figures = {name: ["some", {"method": name}] for name in ("low", "high", "wide", "once", "counted")}
    assert verdict({"holds": holds, "figures": figures}) == expected
    assert str(read_figure("some", {"method": "low"})) == "1.0 [0.9, 1.1]"
    assert str(read_figure("some", {"method": "wide"}, "kl")) == "0.250"
    for wanted in ({"unit": "nats"}, {"method": "none"}):
        with pytest.raises(ValueError, match=r"[02] rows of some\.json have"):
            read_figure("some", wanted)
    with pytest.raises(ValueError, match="is no comparison"):
        verdict({"holds": ["low is less"], "figures": figures})


def test_a_claim_says_that_its_kvzip_is_of_an_earlier_time(tmp_path, monkeypatch):
    row = {"value": 1.0, "low": 0.9, "high": 1.1, "unit": "nats"}
    rows = [row | {"method": method} for method in ("lkv", "lkv-h+kvzip")]
    (tmp_path / "some.json").write_text(json.dumps({"date": "2026-11-26", "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    claim = {"claim": "LKV is better", "where": "here", "holds": ["lkv < zip"], "remark": "A remark."}
    claim["figures"] = {name: ["some", {"method": of}] for name, of in (("lkv", "lkv"), ("zip", "lkv-h+kvzip"))}
    ((*_, text, _),) = claims._claim_lines([claim])
    assert text == "A remark. KVzip was measured before it kept the first four tokens, which improved it."
    claim |= {"holds": ["lkv > 1"], "figures": {"lkv": claim["figures"]["lkv"]}}
    ((*_, text, _),) = claims._claim_lines([claim])
    assert text == "A remark."


def test_the_time_of_choosing_is_held_against_the_method_that_the_claim_names():
    (claim,) = (claim for claim in EVERY if claim["claim"].startswith("Choosing takes no longer than Ada-SnapKV's"))
    lkv, ada, snap = (figures_of(claim)[name] for name in ("lkv", "ada", "snap"))
    # As the remark says: the intervals overlap, and that of SnapKV is apart from both.
    assert lkv.low <= ada.high and ada.low <= lkv.high and snap.high < min(lkv.low, ada.low)
    assert verdict(claim) == claims.UNCLEAR


def test_deviations_name_the_settings_as_they_are():
    here = {what: ours for what, _, ours in deviations()}
    (theirs,) = [theirs for what, theirs, _ in deviations() if what.startswith("Shipped `smollm2-135m-instruct` and")]
    assert "R 0.5 to 0.15, temperature 1 to 0.001" in theirs
    # Of every stage in the two cards, the first ones too.
    assert any(
        "R drawn from 0.03 to 0.5 for each continuation, temperature 0.4 to 0.09" in ours for ours in here.values()
    )
    assert "betas 0.9 and 0.98, weight decay 0.01" in here["AdamW"]
    assert "`--hidden-norm relative`" in here["Hidden-state loss"] and "in bfloat16" in here["Precision"]
