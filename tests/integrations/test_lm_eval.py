"""lm-evaluation-harness with `--model lkv`: its own tasks from local files, scores against a dense reference."""

import importlib
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lkv.errors import IntegrationError, MissingPackageError, PromptError, RetentionError
from tests.conftest import save_model, tiny_llama
from tests.dense import Dense, Row, kept_of
from tests.families import longrope_model

lm_eval = pytest.importorskip("lm_eval")

# Libraries that the harness's tasks read with say so themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using slow pure-python SequenceMatcher"),
    pytest.mark.filterwarnings("ignore:pkg_resources is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jieba"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]

RETENTION = 0.25
CONTEXT = "The harbour of Old Quay holds 41 boats, and its lighthouse was built by Ada Brooks. " * 3
PROMPT = f"Read this.\n\n{CONTEXT}\n\nQuestion: How many boats?\nAnswer:"
OWN = {"context_field": "context", "method": "knorm", "retention": RETENTION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def parts(folder):
    """A model in float64, and its tokenizer."""
    from transformers import AutoTokenizer

    return tiny_llama(vocab_size=259, max_position_embeddings=1024), AutoTokenizer.from_pretrained(folder)


def split(**options):
    from lkv.integrations.lm_eval import ContextSplit

    return ContextSplit(**options)


def harness(parts, kind="lkv", **options):
    from lm_eval.api.registry import get_model

    import lkv.integrations.lm_eval  # noqa: F401

    model, tokenizer = parts
    return get_model(kind)(pretrained=model, tokenizer=tokenizer, **options)


def requests(kind, *arguments, document=None):
    from lm_eval.api.instance import Instance

    document = {"context": CONTEXT} if document is None else document
    return [Instance(kind, document, given, i, ("some_task", i, 1)) for i, given in enumerate(arguments)]


def evicted(model, tokenizer) -> Row:
    """PROMPT as the dense reference sees it: in each head all but the keys of least norm are gone after the context."""
    ids = tokenizer(PROMPT)["input_ids"]
    context = len(tokenizer(PROMPT[: PROMPT.index(CONTEXT.strip()) + len(CONTEXT.strip())])["input_ids"])
    keys = [k for k, _ in Dense(model).read(Row(ids[:context]))[1]]
    every, count = set(range(context)), int(RETENTION * context)
    hidden = [[every - kept_of(-k.norm(dim=-1), every, count)[0] for k in layer] for layer in keys]
    return Row(ids, hidden=[(context, hidden)])


def test_loglikelihood_equals_a_model_with_evicted_entries_masked(parts):
    endings = [" 41 boats", " none", " 4"]
    found = harness(parts, **OWN).loglikelihood(requests("loglikelihood", *[(PROMPT, x) for x in endings]), True)
    row = evicted(*parts)
    for ending, (total, greedy) in zip(endings, found, strict=True):
        new = parts[1](ending)["input_ids"]
        logits = Dense(parts[0]).read(Row(row.ids + new, hidden=row.hidden))[0]
        shares = torch.log_softmax(logits[len(row.ids) - 1 : -1], -1)
        assert total == pytest.approx(float(shares[range(len(new)), new].sum()), abs=1e-8)
        assert greedy == (shares.argmax(-1).tolist() == new)
    stock = harness(parts, "hf").loglikelihood(requests("loglikelihood", (PROMPT, endings[0])), True)
    assert abs(stock[0][0] - found[0][0]) > 0.01


@pytest.mark.parametrize("method", ["full", "knorm"])
def test_a_question_beyond_longropes_change_is_refused(parts, method):
    tokens = len(parts[1](PROMPT)["input_ids"])
    model = longrope_model(tokens - 5, vocab_size=259, max_position_embeddings=1024)
    lm = harness((model, parts[1]), **OWN | {"method": method})
    with pytest.raises(PromptError, match=f"beyond {tokens - 5} tokens this model's rotary embedding"):
        lm.loglikelihood(requests("loglikelihood", (PROMPT, " 41")), True)


def test_answer_equals_a_model_with_evicted_entries_masked(parts):
    lm = harness(parts, **OWN)
    (found,) = lm.generate_until(requests("generate_until", (PROMPT, {"max_gen_toks": 6, "until": []})), True)
    row = evicted(*parts)
    answer = []
    while len(answer) < 6 and (not answer or answer[-1] != 2):
        logits = Dense(parts[0]).read(Row(row.ids + answer, hidden=row.hidden))[0]
        answer.append(int(logits[-1].argmax()))
    assert found == parts[1].decode(answer, skip_special_tokens=True)
    held = lm.get_model_info()["lkv"]["tasks"]["some_task"]
    context, heads = row.hidden[0][0], 3 * 2
    assert held["realised_retention"] == int(RETENTION * context) / context
    assert held["context_tokens"] == context and held["split_source"] == {"field": 1}
    assert held["bytes_full"] == context * heads * 2 * 8 * 8
    assert int(RETENTION * context) * heads * 2 * 8 * 8 <= held["bytes_held"] < 0.5 * held["bytes_full"]


def test_the_bytes_of_a_context_that_questions_share_are_its_own(parts):
    held = []
    for count in (1, 3):
        lm = harness(parts, **OWN)
        lm.loglikelihood(requests("loglikelihood", *[(PROMPT, f" {answer}") for answer in (41, 42, 43)[:count]]), True)
        held.append(lm.get_model_info()["lkv"]["tasks"]["some_task"])
    assert held[1]["bytes_held"] == 3 * held[0]["bytes_held"] and held[1]["bytes_full"] == 3 * held[0]["bytes_full"]


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "knorm", "retention": 1}])
def test_without_eviction_results_equal_the_harness_model(parts, options):
    stock, ours = harness(parts, "hf"), harness(parts, context_field="context", **options)
    # The second prompt is longer than the model's positions: both lose its beginning.
    long = PROMPT.replace(CONTEXT, CONTEXT * 4)
    pairs = [(PROMPT, " 41 boats"), ("", "boats"), (long, " none ")]
    asked = requests("loglikelihood", *pairs, document={"context": CONTEXT})
    both = zip(stock.loglikelihood(asked, True), ours.loglikelihood(asked, True), strict=True)
    for (one, same), (other, also) in both:
        assert one == pytest.approx(other, abs=1e-9) and same == also
    settings = [{"max_gen_toks": 5, "until": ["a"]}, {"max_gen_toks": 9, "until": []}]
    asked = requests("generate_until", (PROMPT, settings[0]), (long, settings[1]), (PROMPT, settings[1]))
    assert stock.generate_until(asked, True) == ours.generate_until(asked, True)


def test_window_and_uncompressed_contexts_are_reported(parts):
    lm = harness(parts, method="knorm", retention=RETENTION, window=10, min_context=100)
    lm.loglikelihood(requests("loglikelihood", (PROMPT, " 4"), ("Boats?", " 41"), document={}), True)
    held = lm.get_model_info()["lkv"]["tasks"]["some_task"]
    context = len(PROMPT) - 10
    assert held["split_source"] == {"window": 2} and held["num_uncompressed"] == 1
    assert held["realised_retention"] == int(RETENTION * context) / context


def test_a_context_that_the_method_cannot_compress_is_left_whole(parts):
    """SnapKV needs more tokens than its window has; the run goes on."""
    question = "\n\nQuestion: How many boats?\nAnswer:"
    pairs = [(CONTEXT[:tokens] + question, " 41 boats") for tokens in (64, 65)]
    lm = harness(parts, method="snapkv", retention=0.5, window=len(question))
    asked = requests("loglikelihood", *pairs, document={})
    found, stock = lm.loglikelihood(asked, True), harness(parts, "hf").loglikelihood(asked, True)
    assert found[0][0] == pytest.approx(stock[0][0], abs=1e-9) and abs(found[1][0] - stock[1][0]) > 1e-3
    held = lm.get_model_info()["lkv"]["tasks"]["some_task"]
    assert held["num_uncompressed"] == 1 and held["context_tokens"] == 64 + 65
    assert held["realised_retention"] == pytest.approx((64 + 65 // 2) / (64 + 65))


def test_questions_share_a_context(parts, monkeypatch):
    import lkv.integrations.lm_eval as integration

    read, real = [], integration.compress_ids
    monkeypatch.setattr(integration, "compress_ids", lambda *a, **k: read.append(len(a[2])) or real(*a, **k))
    harness(parts, **OWN).loglikelihood(requests("loglikelihood", *[(PROMPT, f" {x}") for x in "ABCD"]), True)
    assert len(read) == 1


def test_wrong_options_are_refused(parts):
    with pytest.raises(IntegrationError, match="nothing to compress; evaluate them with --model hf"):
        harness(parts, **OWN).loglikelihood_rolling(requests("loglikelihood_rolling", (PROMPT,)))
    beams = requests("generate_until", (PROMPT, {"num_beams": 3, "max_gen_toks": 4}))
    with pytest.raises(IntegrationError, match="take num_beams out of --gen_kwargs and of the task's"):
        harness(parts, **OWN).generate_until(beams, True)
    for options, error, message in (
        ({"mixed_precision_dtype": "bfloat16"}, IntegrationError, "give dtype=bfloat16"),
        ({"min_context": 0, "method": "knorm"}, IntegrationError, "min_context is 0"),
        ({"method": "knorm", "retention": 2}, RetentionError, "must lie in"),
    ):
        with pytest.raises(error, match=message):
            harness(parts, **options)


def local_task(folder: Path, name: str, family: str, rows: list[dict]) -> None:
    """A task of the harness under its own name, with its documents from a file."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    original = Path(lm_eval.__file__).parent / "tasks" / family / f"{name.removeprefix(family + '_')}.yaml"
    split = "train" if family == "longbench2" else "test"
    lines = [f"include: {original}", f"task: {name}", "dataset_path: json", "dataset_name: null"]
    lines += [f"dataset_kwargs: {{data_files: {{{split}: {folder / name}.jsonl}}, cache_dir: {folder / 'cache'}}}"]
    (folder / f"{name}.yaml").write_text("\n".join(lines))


def evaluate(monkeypatch, folder: Path, tasks: list[str], include: Path, **metadata):
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    import lkv.integrations.lm_eval  # noqa: F401

    # Seconds of asking the system and pip what there is.
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    manager = TaskManager(include_path=str(include), include_defaults=False, metadata=metadata)
    options = {"pretrained": str(folder), "method": "knorm", "retention": RETENTION, "dtype": "float32"}
    return lm_eval.simple_evaluate(
        "lkv", options, tasks=tasks, task_manager=manager, device="cpu", limit=2, bootstrap_iters=0
    )


def test_longbench_from_local_files(folder, tmp_path, monkeypatch):
    asked = {"question": "How many boats?", "answers": ["41"], "length": 40, "language": "en"}
    rows = [{"context": CONTEXT + f"No. {i}", **asked} for i in range(2)]
    local_task(tmp_path, "longbench_qasper", "longbench", rows)
    choices = {"choices": ["41", "42", "43", "44"], "answer": 0}
    local_task(tmp_path, "longbench2_academic_single", "longbench2", [{**row, **choices} for row in rows])
    tasks = ["longbench_qasper", "longbench2_academic_single"]
    results = evaluate(monkeypatch, folder, tasks, tmp_path)
    held = results["config"]["lkv"]
    assert (held["method"], held["retention"]) == ("knorm", RETENTION)
    for task, asked in zip(tasks, (2, 8), strict=True):
        report = held["tasks"][task]
        assert report["requests"] == asked and report["split_source"] == {"field": asked}
        assert RETENTION - 0.01 < report["realised_retention"] <= RETENTION
        assert report["bytes_held"] < 0.6 * report["bytes_full"]
    assert 0 <= results["results"]["longbench_qasper"]["qa_f1_score,none"] <= 1
    samples = results["samples"]["longbench2_academic_single"]
    assert all(math.isfinite(float(score)) for sample in samples for ((score, _),) in sample["resps"])
    json.dumps(held)


def test_ruler_from_the_harness(folder, tmp_path, monkeypatch):
    # Sentences are not split here; the file that would be for that is looked for when the task is read.
    (tmp_path / "tokenizers" / "punkt_tab").mkdir(parents=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    import nltk
    import wonderwords

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    # The harness sorts all pairs of an adjective and a noun: half a minute.
    few = {"nouns": ["quay", "mill", "tower"], "adjectives": ["old", "low", "red"], "verbs": ["hold"]}
    monkeypatch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=few))
    random.seed(0)
    tasks = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    given = {"pretrained": str(folder), "max_seq_lengths": [700]}
    results = evaluate(monkeypatch, folder, ["niah_single_1"], tasks, **given)
    report = results["config"]["lkv"]["tasks"]["niah_single_1"]
    assert report["split_source"] == {"marker": 2} and report["context_tokens"] > 200
    assert RETENTION - 0.01 < report["realised_retention"] <= RETENTION
    for sample in results["samples"]["niah_single_1"]:
        prompt, end = sample["arguments"][0][0], "\nWhat is the special magic number for "
        assert len(prompt) < 700 and prompt.count(end) == 1
    assert report["context_tokens"] == sum(s["arguments"][0][0].index(end) for s in results["samples"]["niah_single_1"])


DOCUMENT_TEXT = "One boat.\nTwo boats. Question: a trap?"
LONGBENCH = f"Answer the question.\n\n{DOCUMENT_TEXT}\n\nAnswer the question based on the above."
LONGBENCH += "\n\nQuestion: Boats?\nAnswer:"
# The ends of RULER's prompts as lm-evaluation-harness writes them.
RULER = {
    "niah_single_1": "\nWhat is the special magic number for old-quay mentioned in the provided text?",
    "niah_multivalue": "\nWhat are all the special magic numbers for old-quay mentioned in the provided text?",
    "ruler_vt": "\nQuestion: Find all variables that are assigned the value 41 in the text above.",
    "ruler_cwe": "\nQuestion: What are the 10 most common words in the above list?",
    "ruler_fwe": "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three?",
    "ruler_qa_squad": "\n\nAnswer the question based on the given documents. Only give me it.\n\nQuestion: Boats?",
}


@pytest.mark.parametrize("task", ["longbench_qasper", "longbench_gov_report_e", "longbench2_academic_single"])
def test_longbench_context_is_a_field(task):
    split_by, end = split().context_end(task, LONGBENCH, {"context": DOCUMENT_TEXT + "\n", "question": "Boats?"})
    assert split_by == "field" and LONGBENCH[end:].startswith("\n\nAnswer the question based on the above.")


@pytest.mark.parametrize("task", RULER)
def test_ruler_question_is_found_by_its_marker(task):
    # The instruction before the texts uses the same words, and a solved example may come first.
    prompt = f"Answer the question based on the given documents. {RULER[task]}\n{DOCUMENT_TEXT}{RULER[task]} Answer:"
    split_by, end = split().context_end(task, prompt, {"input": prompt})
    assert split_by == "marker" and prompt[end:] == RULER[task] + " Answer:"


def test_options_take_precedence_over_known_tasks_and_others_use_the_window():
    document = {"context": DOCUMENT_TEXT, "question": "Boats?"}
    for options, by, rest in (
        ({"context_field": "question"}, "field", "\nAnswer:"),
        ({"question_marker": r"Question: \w+\?"}, "marker", "Question: Boats?\nAnswer:"),
    ):
        split_by, end = split(**options).context_end("longbench_qasper", LONGBENCH, document)
        assert split_by == by and LONGBENCH[end:] == rest
    assert split().context_end("hellaswag", LONGBENCH, {}) == ("window", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_field": "passage"}, "no text in a field 'passage'; its fields are context, question"),
        ({"context_field": "context"}, "text of the field 'context' unchanged; give question_marker"),
        ({"question_marker": "Frage:"}, "is not in the prompt; give context_field"),
        ({"context_field": "context", "question_marker": "Question"}, "give one"),
        ({"question_marker": "("}, "is not a regular expression"),
        *(({"window": window}, "at least one token") for window in (0, 1.5, "8")),
    ],
)
def test_wrong_splits_are_refused(options, message):
    with pytest.raises(IntegrationError, match=message):
        split(**options).context_end("squad", LONGBENCH, {"context": "other words", "question": "Boats?"})


def test_a_missing_harness_is_named(monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lkv.integrations.lm_eval")
    with pytest.raises(MissingPackageError, match=r"lm_eval needs .*pip install .*\[lm-eval\]"):
        importlib.import_module("lkv.integrations.lm_eval")
