"""A small suite of its own for the runner's tests: examples, prompts and scores for the tiny models."""

import json
import random
from dataclasses import replace

import torch

from lkv.evaluation.example import Example, Prompt
from lkv.evaluation.runner import EvaluationConfig, evaluate

NEWLINE = 5


class Letters:
    """A tokenizer of one token a character; ids 0 to 2 are padding, begin and end."""

    chat_template = None
    eos_token_id, pad_token_id = 2, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [NEWLINE if letter == "\n" else 6 + ord(letter) % 60 for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join("\n" if i == NEWLINE else chr(60 + (i - 6) % 60) for i in torch.as_tensor(ids).tolist() if i > 2)


def make_prompt(example, tokenizer, protocol, max_positions):
    context = tokenizer(example.context)["input_ids"]
    room = max_positions - len(example.question) - example.max_new_tokens
    return Prompt(context[:room], tokenizer(example.question)["input_ids"], len(context) > room, False)


def score(example, answer):
    """The share of letters that an answer has in common with the right one."""
    return 100.0 * len(set(answer) & set(example.answers[0])) / len(set(example.answers[0]))


def make_examples(count, tasks=("alpha", "beta"), tokens=90, **changes):
    examples = []
    for number in range(count):
        for task in tasks:
            rng = random.Random(f"{task}-{number}")
            text = "".join(chr(60 + rng.randrange(60)) for _ in range(tokens + 7 * number))
            answers = (text[5:9], text[20:22])
            example = Example("ruler", task, number, text, f"what of {task}?", "", answers, 6, "any", 128)
            examples.append(replace(example, **changes))
    return examples


def run(model, policy, out, examples, methods=("lkv", "snapkv"), retentions=(0.3,), **options):
    options = {"score": score, "make_prompt": make_prompt, "model_name": "tiny"} | options
    evaluate(model, Letters(), examples, EvaluationConfig(methods, retentions, policy=policy, **options), out)
    header, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    return header, lines


def without_seconds(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
