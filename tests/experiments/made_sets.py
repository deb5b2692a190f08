"""Made-up rows of the seven sets, and a tokenizer of words."""

import json
import random

from experiments.data.__main__ import Build

WORDS = [
    f"{a}{b}" for a in ("river", "tower", "garden", "letter", "market", "silver", "winter") for b in "abcdefghijkl"
]


def prose(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


class Tokens:
    """A tokenizer of one token a word, with a template around a turn."""

    eos_token_id = 0
    chat_template = "turns"
    bos_token_id = None
    vocab_size = 1000

    def __len__(self):
        return self.vocab_size

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [len(word) for word in text.split()]}

    def convert_ids_to_tokens(self, ids):
        return ["x" * token for token in ids]

    def decode(self, ids):
        return " ".join("x" * token for token in ids)

    def apply_chat_template(self, messages, **options):
        return f"<user> {messages[0]['content']} </user> <assistant> "


def rows_of(name, count=30):
    """Made-up rows in the columns that the hub has."""
    rng = random.Random(name)
    for i in range(count):
        if name == "hotpotqa":
            titles = [f"Title {i} {j}" for j in range(10)]
            sentences = [[prose(rng, 20), f" Mason {i}."] for _ in titles]
            yield {
                "id": str(i), "question": f"Who built tower {i}?", "answer": f"Mason {i}", "type": "bridge",
                "level": "hard", "supporting_facts": {"title": titles[1:3], "sent_id": [0, 1]},
                "context": {"title": titles, "sentences": sentences},
            }  # fmt: skip
        elif name == "multi_news":
            articles = [prose(rng, 60).replace(". ", ". NEWLINE_CHAR ") for _ in range(3)]
            yield {"document": " ||||| ".join(articles), "summary": "\u2013 " + prose(rng, 30)}
        elif name == "the_stack":
            yield {
                "content": "\n".join(f"value_{k} = {i} + {k}" for k in range(60)), "size": 7, "lang": "X",
                "hexsha": "0", "max_stars_repo_path": f"src/file{i}.{('py', 'java', 'cpp', 'cs')[i % 4]}",
                "max_stars_repo_licenses": ["MIT"],
            }  # fmt: skip
        elif name == "squad":
            yield {
                "id": str(i), "title": f"T_{i // 3}", "context": f"{prose(rng, 80)} Key {i}.",
                "question": f"Which key {i}?", "answers": {"text": [f"Key {i}"], "answer_start": [3]},
            }  # fmt: skip
        elif name == "trec":
            yield {"text": f"What is the {rng.choice(WORDS)} of {i} ?", "coarse_label": 1, "fine_label": i % 50}
        elif name == "mmlu":
            choices = ["1", "2", "3", str(2 * i)]
            yield {"question": f"How many are {i} and {i}?", "subject": "sums", "choices": choices, "answer": 3}
        else:
            story = prose(random.Random(i // 2), 900)
            yield {
                "document": {"id": f"d{i // 2}", "kind": "gutenberg", "text": story, "summary": {"text": "short"}},
                "question": {"text": f"Who left the {story.split()[i]}?", "tokens": ["Who"]},
                "answers": [{"text": f"the keeper {i}", "tokens": ["the"]}, {"text": "nobody", "tokens": ["nobody"]}],
            }


def settings(out, folder, **changes):
    given = {"recipe": "loom", "data": folder, "samples": 40, "held_out": 10, "min_tokens": 200, "max_tokens": 900}
    return Build(out=out, **(given | changes))


def lines_of(folder, side="train"):
    return [
        json.loads(line) for path in sorted(folder.glob(f"{side}-*.jsonl")) for line in path.read_text().splitlines()
    ]


def files(folder):
    """The files of a folder and what they hold."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
