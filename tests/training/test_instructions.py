"""Instructions in training contexts: inserted anywhere, obeyed by all continuations, no change of other samples."""

import json
import random
import re
from collections import Counter

import pytest

from experiments import instructions as evaluated
from lkv.training.data import instructions as training
from lkv.training.data import mixture as mixtures
from lkv.training.data.mixture import Mixture
from lkv.training.data.samples import Continuation

# What sentences demand, read from their words alone: each sentence matches one pattern, whose group is `word`.
CHECKS = {
    r'source .*"(.+)"': lambda reply, word: word in reply,
    r"(?:repeat|copy) the question": lambda reply, word: "what is it?\n" in reply,
    r"german": lambda reply, word: re.search("in dem text steht: |die antwort lautet: ", reply),
    r"italian": lambda reply, word: re.search("nel testo si legge: |la risposta è: ", reply),
    r"portuguese": lambda reply, word: re.search("no texto está escrito: |a resposta é: ", reply),
    r"dutch": lambda reply, word: re.search("in de .{5} staat: |het antwoord is: ", reply),
    r'how sure .*"(.+)"|remark "(.+)"': lambda reply, word: f"{word}: the old mill" in reply,
    r"(?:address the reader as|i am) ([\w ]+)": lambda reply, word: reply.startswith(f"{word}, "),
    r'put "(.+)" in front|first characters .*"(.+)"': lambda reply, word: reply.startswith(f"{word} "),
    r"<(\w+)>": lambda reply, word: re.match(f"<{word}>[^<]+</{word}>", reply),
    r"dash": lambda reply, word: re.match(r"- ([^\n]*\n- )+by the river", reply),
    r"quotation marks": lambda reply, word: re.match('"[^"]+by the river"', reply.replace('"quite certain"', "")),
    r'heading "(.+)"': lambda reply, word: reply.startswith(f"{word}\n"),
    r"(?:field named|yaml, with) (\w+)": lambda reply, word: reply.startswith(f"{word}: "),
    r'(?:sentence|always:) "(.+)"': lambda reply, word: reply.endswith(word),
    r"(?:sign replies with|signature) (.+)\.": lambda reply, word: reply.endswith(f"\n{word}"),
    r"exclamation": lambda reply, word: reply.endswith("!!!"),
    r"no capital|small letters": lambda reply, word: True,
    r"(?<!no )capital letters": lambda reply, word: True,
}
CASES = {r"(?<!no )capital letters": str.upper, r"no capital|small letters": str.lower}


def is_obeyed(sentence, reply):
    found = [(check, match) for pattern, check in CHECKS.items() if (match := re.search(pattern, sentence.lower()))]
    assert len(found) == 1, sentence
    (check, match), cases = found[0], [case for pattern, case in CASES.items() if re.search(pattern, sentence.lower())]
    word = next((group for group in match.groups() if group), "")
    return bool(check(reply.lower(), word)) and all(case(reply) == reply for case in cases)


def test_every_reply_obeys_all_its_instructions():
    sentences, numbers, replies = set(), Counter(), set()
    for seed in range(4000):
        instructions = training.draw_instructions(random.Random(seed))
        obeyed = training.obey(instructions, Continuation("What is it?", "the Old Mill\nby the river"))
        assert obeyed.question == "What is it?"
        for instruction in instructions:
            assert is_obeyed(instruction.sentence, obeyed.target), (instruction, obeyed.target)
            assert not is_obeyed(instruction.sentence, "It is a Mill") and "{" not in instruction.sentence
        sentences |= {instruction.sentence for instruction in instructions}
        numbers[len(instructions)] += 1
        replies.add(obeyed.target)
    assert {*numbers} == {1, 2, 3, 4} and min(numbers.values()) > 900 and len(sentences) > 100 and len(replies) > 1000


@pytest.mark.parametrize("separator", ["\n\n", " "])
def test_instructions_stand_anywhere_and_leave_the_text_as_it_is(separator):
    paragraphs = [f"Paragraph {n} is about the mill." for n in range(8)]
    text = separator.join(paragraphs)
    answers = [Continuation("Which?", "the mill"), Continuation(None, "and so on"), Continuation("All?", text)]
    places: Counter[str] = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        instructions = training.draw_instructions(rng)
        context, (gist, *others) = training.insert_instructions(rng, text, answers, instructions)
        assert all(context.count(instruction.sentence) == 1 for instruction in instructions)
        before, after = context.index(paragraphs[0]), len(context) - context.index(paragraphs[-1]) - len(paragraphs[-1])
        assert re.findall(r"Paragraph \d is about the mill\.", context) == paragraphs
        is_divided = text not in context
        places.update({"before": before > 0, "after": after > 0, "between": is_divided})
        assert (
            " ".join(paragraphs).startswith(gist.target)
            and len(gist.target.split()) == 8
            and gist.question not in ("Which?", None)
        )
        assert others == [answers[0]] if is_divided else [answers[0], answers[2]]
    assert min(places[place] for place in ("before", "after", "between")) > 60


@pytest.mark.parametrize("is_held_out", [False, True])
def test_some_samples_have_instructions_and_the_others_are_as_without(data_folder, is_held_out, monkeypatch):
    def draw():
        mixture = Mixture(data_folder, (100, 400), seed=3)
        mixture = mixture.held_out(3) if is_held_out else mixture
        return [mixture.sample(number, 3) for number in range(400)]

    drawn = []

    def record(rng):
        drawn.append(training.draw_instructions(rng))
        return drawn[-1]

    monkeypatch.setattr(mixtures, "draw_instructions", record)
    samples, instructions = draw(), [*drawn]
    assert draw() == samples and drawn == instructions * 2
    monkeypatch.setattr(mixtures, "INSTRUCTED_SHARE", 0)
    others = draw()
    assert [sample.source for sample in samples] == [sample.source for sample in others]
    instructed = [sample for sample, other in zip(samples, others, strict=True) if sample != other]
    assert len(instructed) == len(instructions) and 45 < len(instructed) < 80
    assert len({sample.source for sample in instructed}) > 3
    for sample, own in zip(instructed, instructions, strict=True):
        assert all(instruction.sentence in sample.context for instruction in own)
        assert len(sample.continuations) == 3 and all(one.question for one in sample.continuations)
        for pattern, case in CASES.items():
            if any(re.search(pattern, instruction.sentence.lower()) for instruction in own):
                assert all(one.target == case(one.target) for one in sample.continuations)


def test_no_instruction_is_worded_as_in_the_evaluation():
    wordings = [wording for kind in training._KINDS for wording in training._WORDINGS[kind]]
    own = json.dumps(wordings).lower()
    assert len(wordings) > 15 and "json" not in own
    for instruction in evaluated.INSTRUCTIONS.values():
        texts = {instruction.text.format(word=word) for word in instruction.words} | {*instruction.words} - {""}
        assert not any(text.lower() in own for text in texts)
