"""The mixture: deterministic, held out from validation, answers present; malformed data named."""

import csv
import gzip
import json
import random

import pytest

from lkv.errors import DataError, MissingPackageError
from lkv.training.data.documents import Passage, read_dataset, split_held_out, split_text
from lkv.training.data.mixture import BUILTIN_TEXTS, Mixture
from lkv.training.data.packing import (
    Lengths,
    ask_to_repeat,
    find_answer,
    insert_sentences,
    make_fact,
    split_to_continue,
)
from lkv.training.data.public_datasets import index_folder
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.utils import extras
from lkv.utils.data_files import read_records
from tests.ruler import write_lines


def test_samples_are_a_function_of_seed_and_index(data_folder):
    one, two = Mixture(data_folder, (100, 400), seed=3), Mixture(data_folder, (100, 400), seed=3)
    other = Mixture(data_folder, (100, 400), seed=4)
    assert [one.sample(i, 2) for i in range(20)] == [two.sample(i, 2) for i in reversed(range(20))][::-1]
    assert [one.sample(i, 2) for i in range(20)] != [other.sample(i, 2) for i in range(20)]
    assert set(one.names) == {"squad", "multihop", "prose", "code", "python", "facts"}
    for index in range(100):
        assert len(one.sample(index, 2).continuations) == 2


@pytest.fixture
def without_instructions(monkeypatch):
    """Samples whose contexts and answers are as their texts have them."""
    monkeypatch.setattr("lkv.training.data.mixture.INSTRUCTED_SHARE", 0)


@pytest.mark.usefixtures("without_instructions")
@pytest.mark.parametrize("builtin", [(), ("articles",)])
def test_validation_texts_are_never_trained_on(data_folder, builtin):
    """Paragraphs of a data set, and the passages that several questions share."""
    training = Mixture(None if builtin else data_folder, (100, 2000), builtin=builtin or ("python",))
    texts = [
        {text for i in range(300) for text in side.sample(i, 1).context.split("\n\n") if builtin or "Key" in text}
        for side in (training, training.held_out())
    ]
    assert len(texts[0]) > 20 and texts[1] and not texts[0] & texts[1]


def test_no_text_stands_twice_in_a_context():
    """Else one of the two could be evicted at no cost."""
    stories = [" ".join(f"{name}{i}." for i in range(500)) for name in ("alpha", "beta", "gamma")]
    mixture = Mixture(None, (3000, 4000), texts=stories, builtin=("tales", "articles"))
    used = set()
    for side in (mixture, mixture.held_out()):
        for i in range(100):
            sample = side.sample(i, 2)
            if sample.source == "articles":
                paragraphs = sample.context.split("\n\n")
            elif sample.source in ("prose", "tales"):
                words = sample.context.split()
                paragraphs = [" ".join(words[start : start + 12]) for start in range(len(words) - 12)]
            else:
                continue
            used.add(sample.source)
            assert len(paragraphs) == len(set(paragraphs))
    assert used == {"articles", "prose", "tales"}


def test_python_and_facts_are_at_most_half_beside_a_long_text(data_folder, tmp_path_factory):
    assert Mixture(data_folder, (100, 400)).weights == {
        "squad": 18, "multihop": 10, "prose": 5, "code": 8, "python": 10, "facts": 20
    }  # fmt: skip
    prose = tmp_path_factory.mktemp("prose")
    for path in data_folder.glob("story*.txt"):
        (prose / path.name).write_bytes(path.read_bytes())
    mixture = Mixture(prose, (100, 400))
    assert mixture.own_chars > 100_000 and {*mixture.weights} == {"prose", "python", "facts"}
    for side in (mixture, mixture.held_out()):
        assert side.weights["prose"] == pytest.approx(sum(side.weights.values()) / 2)
        assert side.weights["facts"] == 2 * side.weights["python"]


@pytest.mark.usefixtures("without_instructions")
def test_questions_can_be_answered_from_their_context(data_folder):
    mixture, checked = Mixture(data_folder, (100, 400)), 0
    for index in range(200):
        item = mixture.sample(index, 1)
        if item.source in ("squad", "multihop", "facts"):
            answer = item.continuations[0].target
            assert answer.removeprefix("in ").lower() in item.context.lower()
            checked += 1
    assert checked > 40


def test_hidden_facts_keep_the_text_and_answer_their_question():
    for seed in range(200):
        rng = random.Random(seed)
        sentence, question, answer = make_fact(rng)
        assert question.endswith("?")
        assert answer.removeprefix("in ").lower() in sentence.lower()
        text = insert_sentences(rng, "One two. Three four! Five six?", [sentence])
        assert sentence in text and text.replace(sentence, "").split() == "One two. Three four! Five six?".split()


def test_missing_empty_and_malformed_data_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no data folder"):
        Mixture(tmp_path / "nowhere", (10, 20))
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"notes\.md is a file; give --data a folder"):
        Mixture(tmp_path / "notes.md", (10, 20))
    (tmp_path / "notes.md").unlink()
    with pytest.raises(DataError, match="has no data to train on"):
        Mixture(tmp_path, (10, 20))
    with gzip.open(tmp_path / "squad_train_subset.jsonl.gz", "wt") as file:
        file.write('{"title": "x", "context": "c", "question": "q", "answers": ["a"]}\n{broken\n')
    with pytest.raises(DataError, match=r"squad_train_subset\.jsonl\.gz, line 2: not a JSON object"):
        Mixture(tmp_path, (10, 20))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_few_plain_texts_are_enough(tmp_path, count):
    for number in range(count):
        words = random.Random(number).choices(["alpha", "beta", "gamma", "delta", "omega"], k=4000)
        (tmp_path / f"book{number}.txt").write_text(" ".join(words))
    training = Mixture(tmp_path, (100, 300))
    for mixture in (training, training.held_out()):
        assert {"prose", "facts"} <= set(mixture.names) and mixture.sample(0, 2).continuations
        assert mixture.with_lengths(Lengths(1, 2)).sample(0, 2) != mixture.sample(0, 2)
    for path in tmp_path.iterdir():
        path.write_text("A short text of one piece. " * 100)
    with pytest.raises(DataError, match="holds too little to keep some apart for evaluation"):
        Mixture(tmp_path, (100, 300)).held_out()


@pytest.mark.parametrize("validation", [False, True])
def test_a_text_in_many_rows_is_on_one_side(tmp_path, validation):
    """Of three contexts with fifty questions each, or of a file that is there twice."""
    contexts = [f"The {name} tower stands at the river. " * 20 for name in ("old", "white", "tall")]
    rows = [{"context": contexts[n % 3], "question": f"Question {n}?", "answer": "the river"} for n in range(150)]
    write_lines(tmp_path / "own.jsonl.gz", rows)
    items = read_dataset("own", [tmp_path / "own.jsonl.gz"], tmp_path)
    side, other = (split_held_out(items, wanted) for wanted in (validation, not validation))
    assert len(side) + len(other) == 150 and not {item.text for item in side} & {item.text for item in other}
    assert {item.text for item in side} == ({contexts[0]} if validation else {*contexts[1:]})
    same = [item for item in items if item.text == contexts[0]]
    assert split_held_out(same, validation) == ([] if validation else same)
    assert split_held_out([], validation) == []


def test_a_field_of_a_table_may_be_a_book(tmp_path):
    with (tmp_path / "book.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["context", "question"], ["word " * 40_000, "why?"]])
    usual = csv.field_size_limit()
    ((_, row),) = read_records(tmp_path / "book.csv")
    assert len(row["context"]) == 200_000 and csv.field_size_limit() == usual


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(0x4E00, 0x9E00))),  # Chinese
        ";".join(f"v{n}=f({n})" for n in range(2000)),  # minified code
        " ".join(str(n) if n % 50 < 35 else f"{n:0100}" for n in range(3000)),  # words of more than one kind
    ],
)
def test_texts_without_spaces_are_repeated_and_continued_in_part(text):
    rng = random.Random(0)
    questions = set()
    for _ in range(20):
        context, (following, repeated) = split_to_continue(rng, [text], 4000)
        assert len(context) > 3500 and 300 < len(following.target) < 600
        opening = repeated.question.partition('"')[2].removesuffix('"')
        assert f"{opening} {repeated.target}" in context or opening + repeated.target in context
        assert 10 < len(opening) <= 400 and 150 < len(repeated.target) <= 2000
        questions |= {ask_to_repeat(rng, context).question for _ in range(5)}
    assert len(questions) > 50
    context, (following, _) = split_to_continue(rng, [f"x = 1;\n{text[:3000]}"], 10_000)
    assert len(context) > 2500 and len(following.target) < 600  # not cut at the only line end, far before


def test_of_texts_with_spaces_words_are_repeated(data_folder):
    text = (data_folder / "story0.txt").read_text()
    words = text.split(" ")
    for seed in range(20):
        start = random.Random(seed).randint(0, len(words) - 54)
        opening, answer = (" ".join(words[start + a : start + b]) for a, b in ((0, 8), (8, 54)))
        question = f'Repeat the part of the text that starts with: "{opening}"'
        assert ask_to_repeat(random.Random(seed), text) == Continuation(question, answer)
    assert ask_to_repeat(random.Random(0), "a short text").target == "a short text"


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


def test_tokenized_sample_knows_where_the_target_begins():
    item = Sample("s", "abcdef", (Continuation("why", "so"), Continuation(None, "ghi")))
    tokens = tokenize_sample(item, Letters(), max_context=4, max_continuation=100)
    assert tokens.context == [ord(c) for c in "abcd"]
    (asked, skip), (following, none) = tokens.continuations
    assert "".join(map(chr, asked[:skip])) == "\n\nQuestion: why\nAnswer:"
    assert asked[skip:] == [ord("s"), ord("o"), 0]
    assert (following, none) == ([ord(c) for c in "ghi"], 0)


class Strict(Letters):
    """A tokenizer that refuses half of a surrogate pair, as those of transformers do."""

    def __call__(self, text, add_special_tokens):
        text.encode()
        return super().__call__(text, add_special_tokens)


def test_half_a_surrogate_pair_stops_no_training(tmp_path):
    """JSON can escape one, and a caller's text can hold one."""
    half = "The \ud83d tower. "
    rows = [{"context": f"{n} {half * 30}", "question": f"What {half}?", "answer": f"A {half}"} for n in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train-v1.1.json").write_text(
        json.dumps({"data": [{"title": half, "paragraphs": [{"context": half * 30, "qas": [
            {"question": half, "answers": [{"text": half}]}]}]}]})
    )  # fmt: skip
    mixture = Mixture(tmp_path, (50, 100), texts=[half * 2000], builtin=())
    assert {*mixture.names} == {"stories", "squad", "prose", "facts"}
    for number in range(30):
        sample = mixture.sample(number, 3)
        assert tokenize_sample(sample, Strict(), 10_000, 10_000).continuations
        assert "tower" in sample.context and "?" in sample.context
    assert [*split_text("na\udcefve.py", half)] == [Passage("na?ve.py", half.replace("\ud83d", "?"))]


def test_the_held_out_items_are_chosen_by_what_they_say(data_folder):
    """Whatever type or file an item comes from: a paragraph of the nested file is held out as that of the flat one."""
    nested = data_folder.parent / "official"
    nested.mkdir()
    flat = gzip.decompress((data_folder / "squad_train_subset.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in flat.splitlines()]
    articles = [
        {"title": row["title"], "paragraphs": [
            {"context": row["context"],
             "qas": [{"question": "Another?", "answers": [{"text": row["answers"][0], "answer_start": 0}]}]}]}
        for row in reversed(rows)
    ]  # fmt: skip
    (nested / "train-v1.1.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    parts = []
    for path in (data_folder / "squad_train_subset.jsonl.gz", nested / "train-v1.1.json"):
        items = read_dataset("squad", [path], path.parent)
        assert len(items) == 80
        parts.append({item.text for item in split_held_out(items, True)})
    assert parts[0] == parts[1] and 0 < len(parts[0]) < 20


def test_every_file_is_named_taken_or_left(data_folder):
    names = "README.md", "dev-v1.1.json", "picture.png", "trec_train_5500.label.gz", "mmlu_test.jsonl", "mmlu_val.jsonl"
    for name in (*names, "mmlu_dev_test.jsonl.gz", "mmlu_auxiliary_train.jsonl"):
        (data_folder / name).write_bytes(b"")
    (data_folder / "mine.jsonl").write_text(
        '{"context": "The key is in the well.", "question": "Where?", "answer": "there"}\n'
    )
    for name in ("test/own_questions.jsonl", "data/validation/rows.jsonl", "latest/more.jsonl"):
        (data_folder / name).parent.mkdir(parents=True)
        (data_folder / name).write_bytes((data_folder / "mine.jsonl").read_bytes())
    found = index_folder(data_folder, ["squad", "hotpotqa", "mmlu", "own", "text", "code"])
    assert found.used["mmlu"] == [data_folder / "mmlu_auxiliary_train.jsonl", data_folder / "mmlu_dev_test.jsonl.gz"]
    assert found.used["own"] == [data_folder / "latest/more.jsonl", data_folder / "mine.jsonl"]
    assert len(found.used["text"]) == len(found.used["code"]) == 40
    assert {path.name: why for path, why in found.skipped.items()} == {
        "README.md": "describes the data sets",
        "dev-v1.1.json": "not a training split",
        "mmlu_test.jsonl": "not a training split",
        "mmlu_val.jsonl": "not a training split",
        "own_questions.jsonl": "not a training split",
        "rows.jsonl": "not a training split",
        "picture.png": "neither text nor code",
        "trec_train_5500.label.gz": "not used by this recipe",
    }
    said = "\n".join(found.lines())
    every = {path for path in data_folder.rglob("*") if path.is_file()}
    assert {*found.skipped, *(path for paths in found.used.values() for path in paths)} == every
    assert (
        "squad: squad_train_subset.jsonl.gz" in said
        and "skipped (describes the data sets): README.md" in said
        and "and 32 more" in said
    )


def test_a_readme_beside_own_documents_is_one_of_them(tmp_path):
    for name in ("README.md", "notes.md", "LICENSE.txt"):
        (tmp_path / name).write_text("The tide table hangs beside the door of the boat house.")
    (tmp_path / "shared").symlink_to(tmp_path)
    index = index_folder(tmp_path)
    assert index.used == {"text": [tmp_path / "README.md", tmp_path / "notes.md"]}
    links = "links to folders, broken links, pipes or folders without access"
    assert index.skipped == {tmp_path / "shared": links, tmp_path / "LICENSE.txt": "a licence"}


def test_documents_that_cannot_be_read_are_left_out_by_name_and_texts_are_decoded(tmp_path, monkeypatch, capsys):
    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "selectolax" else find(name))
    notes = "Die Fähre fährt über den Fluß, und die Brücke ist gesperrt. " * 200
    (tmp_path / "notes.md").write_text(notes, encoding="cp1252")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.txt").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "page.html").write_text("<p>The key is under the third stone.</p>")
    mixture = Mixture(tmp_path, (100, 200), skip_unknown=True)
    said = mixture.lines
    assert said[0] == "used as text: notes.md" and mixture.own_chars == len(notes)
    assert "notes.md: uncertain: the encoding is a guess" in capsys.readouterr().err  # as `lkv ask` reports it
    assert {"skipped (empty): empty.txt", "skipped (no text that can be read): image.txt"} <= {*said}
    needs = next(line for line in said if line.endswith(": page.html"))
    assert needs.startswith("skipped (needs `pip install") and "documents" in needs
    with pytest.raises(DataError, match=r"image.txt cannot be read as text .*, or remove it from the folder"):
        Mixture(tmp_path, (100, 200))
    (tmp_path / "image.txt").unlink()
    with pytest.raises(MissingPackageError, match=r"page.html cannot be read: .*selectolax"):
        Mixture(tmp_path, (100, 200))


@pytest.mark.parametrize("name", ["strange.parquet", "questions.json.gz", "rows.jsonl", "all.zip"])
def test_data_that_is_not_recognised_is_refused(data_folder, name):
    (data_folder / name).write_text('{"passage": "of other columns"}\n')
    with pytest.raises(DataError, match=rf"holds data that is not recognised: {name}; give the files their official"):
        Mixture(data_folder, (100, 400))


def test_texts_of_our_own_answer_their_questions():
    tales, talks, articles = (list(BUILTIN_TEXTS[name][2]()) for name in ("tales", "talks", "articles"))
    assert len(tales) >= 30 and len(talks) >= 8 and len(articles) >= 60
    for story in tales:
        assert len(story.text) > 2000 and len(story.questions) >= 5
        assert all(find_answer(story.text, *pair) >= 0 for pair in story.questions)  # around which a window is cut
    for meeting in talks:
        assert len(meeting.queries) >= 5
        assert all(0 <= first <= last < len(meeting.turns) for _, _, first, last in meeting.queries)
    for question in articles:
        assert question.needed and question.needed <= {*range(len(question.passages))}
        read = [question.passages[number] for number in question.needed]
        needed = " ".join(f"{passage.title} {passage.text}" for passage in read)
        assert question.answer.removeprefix("the ").lower() in needed.lower()
    for items in (tales, talks, articles):
        assert 0 < len(split_held_out(items, True)) < len(items) / 4


def test_a_window_is_cut_around_the_answer_or_its_longest_word():
    text = "The miller slept. At dawn the postmistress brought a letter."
    assert find_answer(text, "What came?", "a letter") == text.index("a letter")
    assert find_answer(text, "What did the postmistress do?", "She brought news.") == text.index("postmistress")
    assert find_answer(text, "Why?", "Unknown!") == -1


def test_lengths_are_drawn_by_their_power():
    rng = random.Random(0)
    for power, median, mean in ((0.0, 1000, 1353), (1.0, 471, 739)):  # log-uniform, and density n ** -2
        drawn = sorted(Lengths(250, 4000, power).draw(rng) for _ in range(20_000))
        assert drawn[0] >= 250 and drawn[-1] <= 4000
        assert drawn[10_000] == pytest.approx(median, rel=0.03) and sum(drawn) / 20_000 == pytest.approx(mean, rel=0.03)
