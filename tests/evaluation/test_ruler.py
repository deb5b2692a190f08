"""RULER: each task satisfies its definition at any length and for any tokenizer."""

import re
import string
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lkv.errors import EvaluationError
from lkv.evaluation.ruler import TASKS, Sources, make_examples
from lkv.evaluation.ruler.examples import largest_fit
from lkv.evaluation.ruler.tasks import SENTENCE_END
from lkv.utils.prompts import chat_template_parts
from tests.ruler import ESSAY, one, size, squad_data, words, write_json

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (.+?)\.(?=\s|$)")


# Where kvpress's evaluation cuts RULER's inputs: the last match begins the question, the next the answer prefix.
CUTS = {
    "niah": (r"What (?:is|are all) the special magic", "The special magic"),
    "vt": ("Question: Find all variables that are assigned the value", "Answer:"),
    "cwe": (r"Question: What are the 10 most common words in the above list\?", "Answer:"),
    "fwe": (r"Question: Do not provide any explanation\.", "Answer:"),
    "qa": (r"Answer the question based on the given documents\.", "Answer:"),
}


lengths, seeds = st.integers(900, 5000), st.integers(0, 10_000)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=6)
@given(length=lengths, seed=seeds)
def test_every_task_fills_its_length_and_no_more(sources, task, length, seed):
    example = one(task, length, seed, sources)
    unit = 80 if task.startswith("qa") else 40
    # Five tokens are held back for the places where the texts meet.
    assert length - max(unit, length / 256) - 5 <= size(example) <= length - 5
    assert (example.suite, example.task, example.number, example.length) == ("ruler", task, 0, length)
    assert example.metric == ("string_match_part" if task.startswith("qa") else "string_match_all")
    assert example.chat and len(set(example.answers)) == len(example.answers)
    tokens = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    assert example.max_new_tokens == tokens[task.split("_")[0]]


@pytest.mark.parametrize("task", TASKS)
def test_context_question_and_prefix_are_cut_as_kvpress_cuts_them(sources, task):
    example = one(task, 4096, 1, sources)
    question, answer = CUTS[task.split("_")[0]]
    whole = example.context + example.question + example.answer_prefix
    cut = list(re.finditer(question, whole))[-1].start()
    at = cut + re.search(answer, whole[cut:]).start()
    assert (whole[:cut], whole[cut:at], whole[at:]) == (example.context, example.question, example.answer_prefix)
    assert not re.search(r"[{}]", whole)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=2)
@given(seed=seeds, count=st.integers(1, 4))
def test_an_example_depends_on_its_number_and_seed_only(sources, task, seed, count):
    four = make_examples(task, 1500, 4, words, sources, seed)
    assert make_examples(task, 1500, count, words, sources, seed) == four[:count]
    assert [example.number for example in four] == [0, 1, 2, 3]
    assert len({example.context for example in four}) == 4
    assert one(task, 1500, seed + 1, sources) != four[0]


NIAH = [task for task in TASKS if task.startswith("niah")]


# Keys, values a key, keys asked for.
SHAPES = {"niah_multikey_1": (4, 1, 1), "niah_multivalue": (1, 4, 1), "niah_multiquery": (4, 1, 4)}


@pytest.mark.parametrize("task", NIAH)
@settings(max_examples=6)
@given(length=lengths, seed=seeds)
def test_needles(sources, task, length, seed):
    example = one(task, length, seed, sources)
    found = NEEDLE.findall(example.context)
    pairs = [(key, value) for _, key, value in found]
    keys, values, queries = SHAPES.get(task, (1, 1, 1))
    assert len(set(pairs)) == len(pairs) and len({value for _, value in pairs}) == len(pairs)
    if task in ("niah_multikey_2", "niah_multikey_3"):
        assert len(pairs) > 20 and len({key for key, _ in pairs}) == len(pairs)
    else:
        assert Counter(Counter(key for key, _ in pairs).values()) == {values: keys}
    asked = re.findall(r"for (.+?) mentioned", example.question)[0].replace(" and ", " ").split(", ")
    assert len(asked) == queries
    # The answers are the values of the keys asked for, in that order, each once in the context.
    held = {key: {value for other, value in pairs if other == key} for key in asked}
    assert set(example.answers) == set().union(*held.values()) and len(example.answers) == queries * values
    assert all(example.context.count(answer) == 1 for answer in example.answers)
    if queries > 1:
        assert [held[key] for key in asked] == [{answer} for answer in example.answers]
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    of_uuids = task in ("niah_single_3", "niah_multikey_3")
    assert all(re.fullmatch(uuid if of_uuids else r"[1-9]\d{6}", answer) for answer in example.answers)
    plural = queries * values > 1
    assert example.context.startswith(f"{'Some' if plural else 'A'} special magic")
    kind = ("uuid" if of_uuids else "number") + "s" * plural
    assert example.answer_prefix.startswith(f"The special magic {kind} for ")
    assert example.answer_prefix.endswith("text are" if plural else "text is")


def test_the_haystack_is_noise_or_the_essay_from_its_start(sources):
    noise = one("niah_single_1", 2000, 0, sources).context.split("\n")[1:-1]
    assert sorted(Counter(noise).values())[0] == 1 and len(Counter(noise)) == 2
    context = one("niah_multikey_1", 3000, 0, sources).context.split("\n", 1)[1]
    assert ESSAY.startswith(NEEDLE.sub("", context).replace("  ", " ").strip())


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_single_2"])
def test_needles_lie_at_all_depths(sources, task):
    depths = []
    for example in make_examples(task, 1000, 60, words, sources):
        text = example.context.split("\n", 1)[1]
        match = next(match for match in NEEDLE.finditer(text) if match[3] == example.answers[0])
        before, after = text[: match.start()].strip(), text[match.end() :].strip()
        # After a whole line or sentence, or after the last one, which may be cut.
        assert not before or before.endswith(".") or not after
        depths.append(match.start() / max(1, len(text) - len(match[0])))
    assert min(depths) < 0.1 and max(depths) > 0.85 and 0.35 < sum(depths) / 60 < 0.65


def resolve(text):
    """Every variable's value, by following the assignments."""
    source = {}
    for name, value in re.findall(r"VAR ([A-Z]+) = (\d+|VAR [A-Z]+)", text):
        assert name not in source
        source[name] = value.removeprefix("VAR ")

    def value(name):
        return name if name.isdigit() else value(source[name])

    return {name: value(name) for name in source}


@settings(max_examples=15)
@given(length=lengths, seed=seeds)
def test_variables_are_chained(sources, length, seed):
    example = one("vt", length, seed, sources)
    asked = re.search(r"value (\d+)", example.question)[1]
    values = resolve(example.context)
    assert {name for name, value in values.items() if value == asked} == set(example.answers)
    assert len(values) == 10 and len(set(values.values())) == 2
    # One chain, assigned in order: each variable from the one before.
    assert re.findall(r"VAR ([A-Z]{5}) = ", example.context) == list(example.answers)
    chain = re.findall(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})", example.context)
    assert chain == [(new, old) for old, new in pairwise(example.answers)]
    # The worked example shows its own answer.
    shown = re.search(r"they are:  ((?:[A-Z]{3} ?){5})\n\n", example.context)[1].split()
    assert set(shown) == set(values) - set(example.answers)
    assert f"5 variables are assigned the value {asked}, they are: " in example.answer_prefix


@settings(max_examples=15)
@given(length=lengths, seed=seeds)
def test_common_words_are_the_most_common(sources, length, seed):
    example = one("cwe", length, seed, sources)
    worked, listed = re.findall(r"appear most often\.\n(.+)\nQuestion|appear most often\.\n(.+)\n$", example.context)
    shown = re.search(r"are: (1\. .+)\n", example.context)[1]
    for text, often, seldom, answers in (
        (worked[0], *((10, 3) if length >= 4096 else (3, 1)), entries(shown)),
        (listed[1], *((30, 3) if length >= 4096 else (6, 1)), example.answers),
    ):
        counts = Counter(entries(text))
        assert {word for word, _ in counts.most_common(10)} == set(answers) and len(set(answers)) == 10
        assert set(counts.values()) == {often, seldom} and Counter(counts.values())[often] == 10


def entries(text):
    """The words of a numbered list, whose numbers count up from one."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_a_list_longer_than_the_vocabulary_has_pairs_of_words(sources):
    example = one("cwe", 80_000, 0, sources, tokenizer=lambda text, add_special_tokens: {"input_ids": text.split()})
    counts = Counter(entries(example.context.rsplit("often.\n", 1)[1].rstrip("\n")))
    assert len(counts) > 9000 and set(counts.values()) == {30, 3}
    assert {word for word, _ in counts.most_common(10)} == set(example.answers)


@settings(max_examples=15)
@given(length=lengths, seed=seeds)
def test_frequent_words_are_the_most_frequent(sources, length, seed):
    example = one("fwe", length, seed, sources)
    text = re.search(r"coded words\. (.+)\n$", example.context)[1].split()
    counts = Counter(text)
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *example.answers]
    assert counts[example.answers[2]] > max([n for word, n in counts.items() if word not in ranked], default=0)
    # Frequencies fall with the square of the rank; rounding down loses less than one word each.
    assert all(abs(counts[word] - counts["..."] / rank**2) < 1.3 for rank, word in enumerate(ranked, 1))
    assert all(len(word) == 6 and set(word) <= set(string.ascii_lowercase) for word in counts if word != "...")


@pytest.mark.parametrize(("task", "needed"), [("qa_1", 1), ("qa_2", 2)])
@settings(max_examples=6)
@given(length=lengths, seed=seeds)
def test_documents_hold_the_answer(sources, task, needed, length, seed):
    example = one(task, length, seed, sources)
    documents = re.split(r"(?:^|\n\n)Document \d+:\n", example.context.split("documents.\n\n")[1])
    numbers = re.findall(r"Document (\d+):\n", example.context)
    assert [int(number) for number in numbers] == list(range(1, len(documents)))
    assert len(set(documents)) == len(documents)
    if task == "qa_1":
        a, p = re.search(r"key of (\d+) (\d+)\?", example.question).groups()
        assert example.answers == (f"Key{a}{p}", "key")
        assert sum(f"Article {a} has paragraph {p}," in document for document in documents) == 1
        # The article's other paragraphs come before those of other articles.
        assert example.context.count(f"Article {a} has") >= 3
    else:
        i = re.search(r"story (\d+)\?", example.question)[1]
        titles = {document.split("\n")[0] for document in documents}
        assert {f"Title {i}-2", f"Title {i}-7"} <= titles and example.answers == (f"Name{i}",)
        assert len(documents) - 1 < 10 or {f"Title {i}-{j}" for j in range(10)} <= titles


def test_questions_too_long_for_the_length_are_passed_over(tmp_path):
    data = squad_data(20)
    data["data"][3]["paragraphs"][0]["context"] += " very long" * 2000
    sources = Sources(squad=write_json(tmp_path / "squad.json", data))
    examples = make_examples("qa_1", 900, 59, words, sources)
    assert len({example.question for example in examples}) == 59 and all(size(example) <= 900 for example in examples)
    assert not any("key of 3 0?" in example.question for example in examples)
    with pytest.raises(EvaluationError, match="qa_1 has only 59 questions that fit 900 tokens"):
        make_examples("qa_1", 900, 60, words, sources)


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_length_is_refused_with_the_shortest(sources, task):
    with pytest.raises(EvaluationError, match="needs at least") as refused:
        one(task, 60, 0, sources)
    shortest = int(re.search(r"at least (\d+) tokens", str(refused.value))[1])
    example = one(task, shortest + 30, 0, sources)
    assert shortest - 30 <= size(example) <= shortest + 30


@given(unit=st.integers(1, 40), least=st.integers(1, 120), limit=st.integers(1, 200_000), noise=st.integers(0, 5),
       most=st.none() | st.integers(120, 3000))  # fmt: skip
def test_the_search_finds_the_largest_within_few_measurements(unit, least, limit, noise, most):
    asked = []

    def tokens(units):
        asked.append(units)
        return units * unit + (units * 7919) % (noise + 1)

    fit = largest_fit(tokens, limit, least, most)
    assert fit.tokens == tokens(fit.units) and least <= fit.units and (most is None or fit.units <= most)
    if fit.tokens > limit:
        assert fit.units == least
    else:
        assert fit.units == most or fit.tokens >= limit - limit // 256 - unit - noise
    assert len(asked) < 30 and max(asked) <= max(64 * fit.units, 2 * least + 16)


@pytest.mark.parametrize("curve", [lambda n: n**3, lambda n: n if n < 700 else 10**9, lambda n: 7 + (n > 64) * n // 9])
def test_the_search_is_bounded_where_sizes_do_not_grow_evenly(curve):
    asked = []

    def tokens(units):
        asked.append(units)
        return curve(units)

    limit = 100_000
    fit = largest_fit(tokens, limit, 1, 10**6)
    assert fit.tokens <= limit < curve(fit.units + 1) or fit.tokens >= limit - limit // 256
    assert len(asked) <= 60


@pytest.fixture(scope="module")
def merging():
    """A byte-pair tokenizer with a chat template, trained on text like the tasks' own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<turn>"]
    alphabet, also = pre_tokenizers.ByteLevel.alphabet(), "The special magic numbers are. Question: words Answer: text"
    options = {"vocab_size": 600, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator([ESSAY, also], trainers.BpeTrainer(**options))
    template = (
        "<s>system\nBe brief.<turn>\n{% for m in messages %}user\n{{ m['content'] }}<turn>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", chat_template=template)


@pytest.mark.parametrize("task", TASKS)
def test_the_whole_prompt_in_the_chat_template_stays_within_the_length(sources, merging, task):
    for example in make_examples(task, 4000, 2, merging, sources):
        before, _, after = chat_template_parts(merging)
        apart = (before + example.context, example.question + after + example.answer_prefix)
        for parts in (apart, ("".join(apart),)):
            ids = [merging(part, add_special_tokens=False)["input_ids"] for part in parts]
            total = sum(map(len, ids)) + example.max_new_tokens
            assert 4000 - (300 if task.startswith("qa") else 100) <= total <= 4000


def test_sentences():
    assert SENTENCE_END.split('He said "no." Then he left! Did 3.5 help? "Yes." 7 did (once). e.g. this') == [
        'He said "no.', "Then he left!", "Did 3.5 help?", '"Yes.', "7 did (once). e.g. this"
    ]  # fmt: skip
