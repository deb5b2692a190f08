"""Many questions in a row about one compressed text, the earlier questions and answers kept.

python -m experiments.turns --data FOLDER    (FOLDER is the evaluation folder; writes turns.json)
python -m experiments.turns --data FOLDER --model NAME    (turns-NAME.json)

As many facts as there are `--turns` are hidden in a tale, and each is asked for once. The answers are the full
cache's. Methods compress the text once, before the first question; "METHOD, anew" compresses the text with all earlier
questions and answers before each question. Budgets are shares of the bytes of the compressed tokens in 16 bits.
"""

from pathlib import Path

import torch
from torch import Tensor

from experiments.bootstrap import bootstrap, named_interval
from experiments.common import SUBJECT, Subject, parse_options, run_samples, subject_of
from experiments.fidelity import Sample, fidelity_row, kl_and_agreement
from experiments.heldout import Needles, make_needles
from lkv.context.compression import compress_ids
from lkv.context.generation import generate
from lkv.hf.cache_argument import pass_arguments
from lkv.methods.registry import FULL
from lkv.methods.request import CompressionRequest
from lkv.training.data import documents
from lkv.utils.data_files import read_records
from lkv.utils.prompts import decode_tail, encode_next_question, encode_question

METHODS = ["lkv", "lkv, anew", "lkv+compensation", "snapkv", "expected"]
LENGTH = 24  # new tokens of an answer


def main() -> None:
    options = parse_options(
        __doc__, "turns", "of evaluation files", **SUBJECT, methods=METHODS, tokens=2000, turns=10,
        memory=[0.1, 0.05], contexts=10, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options, "turns")
    tales = [tale.text for tale in documents.fairytale(read_records(options.data / "fairytaleqa_val.jsonl.gz"))]
    cases = {str(number): (number,) for number in range(options.contexts)}
    rows = [(method, memory) for memory in options.memory for method in options.methods]

    def measure_case(number: int) -> Sample:
        item = make_needles(subject.tokenizer, tales, options.tokens, options.turns, options.seed * 100_000 + number)
        return measure(subject, item, rows)

    run_samples("turns", options, cases, measure_case, summarise, subject, "contexts")


@torch.no_grad()
def measure(subject: Subject, item: Needles, rows: list[tuple[str, float]]) -> Sample:
    """KL, agreement and whether the fact is found, by turn and row; None for facts that the full cache misses."""
    model, tokenizer = subject.model, subject.tokenizer
    ids, spans = converse(subject, item)
    turns = list(zip(spans, item.facts, strict=True))
    expected = model.base_model(input_ids=torch.tensor([ids]))[0][0]
    measured: list[list[list[float]]] = [[] for _ in turns]
    hits: list[list[bool | None]] = [[] for _ in turns]
    for name, memory in rows:
        method, _, anew = name.partition(", ")
        request = CompressionRequest(method=method, memory=memory, policy=subject.policy)
        if not anew:
            once = predict(subject, ids, len(item.ids), request)
        for turn, ((begin, start, end), (_, fact)) in enumerate(turns):
            own = predict(subject, ids[:end], begin, request) if anew else once[: end - len(item.ids)]
            states = expected[start - 1 : end], own[start - 1 - end :]
            pair = [torch.log_softmax(model.lm_head(x).float(), -1) for x in states]
            measured[turn].append(kl_and_agreement(*pair))
            answers = [tokenizer.decode(x.argmax(-1)) for x in pair]
            hits[turn].append(fact in answers[1] if fact in answers[0] else None)
    return {"tokens": len(item.ids), "rows": rows, "measured": measured, "hits": hits}


def converse(subject: Subject, item: Needles) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The ids of the text with all questions and the full cache's answers; of each turn where the question begins,
    where the answer does, and where it ends."""
    model, tokenizer, ids = subject.model, subject.tokenizer, list(item.ids)
    spans: list[tuple[int, int, int]] = []
    with compress_ids(model, tokenizer, ids, CompressionRequest(method=FULL)).working_cache() as cache:
        for question, _ in item.facts:
            encode = encode_next_question if spans else encode_question
            prompt = ids + encode(tokenizer, question, decode_tail(tokenizer, ids))
            answer = generate(model, tokenizer, [prompt], 0, cache, max_new_tokens=LENGTH)[0].tolist()
            begin, ids = len(ids), prompt + answer[:-1]  # an end token is part of the next question's template
            spans.append((begin, len(prompt), len(ids)))
    return ids, spans


def predict(subject: Subject, ids: list[int], tokens: int, request: CompressionRequest) -> Tensor:
    """The last hidden states [n, D] of the n ids that follow the first `tokens`, which are compressed."""
    context = compress_ids(subject.model, subject.tokenizer, ids[:tokens], request)
    with context.working_cache() as cache:
        rest = torch.tensor([ids[tokens:]])
        return subject.model.base_model(input_ids=rest, **pass_arguments(cache, rest))[0][0]


def summarise(samples: list[Sample]) -> list[dict]:
    """Rows by memory, method and half of the turns ("all" for the whole)."""
    rows = []
    middle = len(samples[0]["measured"]) // 2
    parts = {"all": slice(None), "first": slice(middle), "last": slice(middle, None)}
    for index, (method, memory) in enumerate(samples[0]["rows"]):
        for part, turns in parts.items():
            row = {"method": method, "memory": memory, "turns": part, "tokens": samples[0]["tokens"]}
            row |= fidelity_row([({"measured": sample["measured"][turns]}, index) for sample in samples])
            hits = [[t[index] for t in sample["hits"][turns] if t[index] is not None] for sample in samples]
            if groups := [group for group in hits if group]:
                row |= named_interval("recall", bootstrap(groups)) | {"facts": sum(map(len, groups))}
            rows.append(row)
            print(f"{method:18} memory {memory:5} {part:6} kl {row['kl']:.4f} recall {row.get('recall', '-')}")
    return rows


if __name__ == "__main__":
    main()
