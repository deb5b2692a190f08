"""Serving on a CPU: many requests over few contexts, compressed and full, at once and one after another.

python -m experiments.serving    (writes serving.json; on an idle machine)

Rows by `what`: "throughput" (16 requests at once by one after another), "latency" and "tokens" (by concurrency),
"memory" (bytes held by those of full caches), "loading" (compressing by loading), "same memory" (requests a second
where memory holds little more than one full cache, by those of full caches).
"""

import random
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from operator import truediv
from typing import Any

from experiments.bootstrap import bootstrap
from experiments.common import interleaved, parse_options, save_rows, wall_clock
from experiments.instructions import QUESTION, invent
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.serving.answer import Answer, SamplingParams
from lkv.serving.batcher import AnswerWorker
from lkv.serving.inputs import CompressionSettings, context_id
from lkv.serving.store import ContextStore
from lkv.serving.stored_context import StoredContext
from lkv.utils.prompts import encode_context, encode_question

LOAD: dict[str, Any] = {
    "tokens": 4000, "retention": 0.15, "contexts": 4, "length": 32, "concurrency": [1, 4, 16, 64], "repeats": 3,
}  # fmt: skip
Asked = tuple[Context, str]


def make_text(tokenizer: Any, tokens: int, seed: int) -> str:
    """About `tokens` tokens of invented sentences, the same for the same seed."""

    def is_too_long(sentences: int) -> bool:
        return len(encode_context(tokenizer, invent(random.Random(seed), sentences))) > tokens

    return invent(random.Random(seed), bisect_left(range(tokens // 4), True, key=is_too_long) - 1)


def questions_of(contexts: Sequence[Context], count: int) -> list[Asked]:
    """`count` questions, the contexts in turn."""
    turns = enumerate(islice(cycle(contexts), count), 1)
    return [(context, f"What does sentence {number} tell?") for number, context in turns]


def one_after_another(asked: list[Asked], length: int) -> tuple[list[str], int, float]:
    """Answers, their tokens, and seconds."""
    started, answers, tokens = time.perf_counter(), [], 0
    for context, question in asked:
        answers.append(context.ask(question, length))
        tokens += context.answer_tokens
    return answers, tokens, time.perf_counter() - started


def at_once(
    worker: AnswerWorker, asked: list[Asked], length: int, clients: int
) -> tuple[list[str], int, list[float], float]:
    """Answers, their tokens, seconds of each and of all, where `clients` ask one question after another."""

    def ask(job: Asked) -> tuple[Answer, float]:
        started = time.perf_counter()
        answer = worker.submit(encode_question(worker.tokenizer, job[1]), job[0], SamplingParams(max_tokens=length))
        answer.done.wait()
        return answer, time.perf_counter() - started

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, asked))
    seconds = time.perf_counter() - started
    texts = [answer.text for answer, _ in answers]
    return texts, sum(len(answer.ids) for answer, _ in answers), [took for _, took in answers], seconds


def ratio_row(
    about: dict[str, Any], what: str, unit: str, baseline: str, ratios: Sequence[float], **more: Any
) -> dict[str, Any]:
    mean = bootstrap([[ratio] for ratio in ratios])._asdict()
    print(f"{what} {more}: {mean}", flush=True)
    return {**about, "what": what, "unit": unit, "baseline": baseline, **mean, **more}


def throughput_row(
    worker: AnswerWorker, contexts: Sequence[Context], length: int, repeats: int, about: dict[str, Any]
) -> dict[str, Any]:
    """Tokens a second of 16 requests at once by those of one after another, in pairs."""
    asked, ratios, equal = questions_of(contexts, 16), [], 0
    for _ in range(repeats):
        right, tokens, alone = one_after_another(asked, length)
        texts, generated, _, seconds = at_once(worker, asked, length, 16)
        ratios.append(generated / seconds / (tokens / alone))
        equal += sum(map(str.__eq__, texts, right))
    unit = "tokens a second of 16 requests at once by those of one after another, mean of pairs"
    return ratio_row(about, "throughput", unit, "one after another", ratios, equal=equal, answers=16 * repeats)


def latency_rows(
    worker: AnswerWorker, contexts: Sequence[Context], length: int, concurrency: Sequence[int], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Seconds of an answer (median, 95th percentile) and tokens a second, by how many ask at once."""
    rows = []
    for clients in concurrency:
        asked = questions_of(contexts, max(16, 2 * clients))
        _, tokens, latencies, seconds = at_once(worker, asked, length, clients)
        latencies.sort()
        common = about | {"concurrency": clients, "n": len(latencies)}
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            value = latencies[min(len(latencies) - 1, int(share * len(latencies)))]
            rows.append(common | {"what": "latency", "statistic": name, "value": value, "unit": "seconds"})
        rate, middle = tokens / seconds, latencies[len(latencies) // 2]
        rows.append(common | {"what": "tokens", "value": rate, "unit": "tokens a second"})
        print(f"{about['method']:5} {clients:3} at once: {rate:7.1f} tokens/s, median {middle:.2f} s")
    return rows


class Shelf:
    """A store with room for little more than one full cache, and the names of all contexts in it."""

    def __init__(self, folder: str, contexts: Sequence[Context], texts: Sequence[str], retention: float, room: int):
        policy = contexts[0].metadata["policy"]
        self._made = folder, contexts[0].model, contexts[0].tokenizer, policy
        self.store = ContextStore(*self._made, room)
        self.names = []
        for context, text in zip(contexts, texts, strict=True):
            settings = CompressionSettings("lkv", retention, policy, "benchmark", "benchmark")
            self.names.append(context_id(text, settings))
            self.store.put(StoredContext.describe(self.names[-1], "", context, settings), context)

    def answer_all(self, worker: AnswerWorker, length: int) -> None:
        """Answer 16 requests, four at once, each of which finds its context in the store."""
        asked = list(islice(cycle(self.names), 16))

        def ask(name: str) -> None:
            context = self.store.get(name)
            question = encode_question(worker.tokenizer, QUESTION)
            worker.submit(question, context, SamplingParams(max_tokens=length)).done.wait()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, asked))

    def load_seconds(self) -> list[float]:
        """Seconds to load each context from its file."""
        fresh = ContextStore(*self._made, 0)
        return [wall_clock(partial(fresh.get, name)) for name in self.names]


def main() -> None:
    options = parse_options(__doc__, "serving", **LOAD)
    model, tokenizer = load_default()
    policy = default_policy()
    texts = [make_text(tokenizer, options.tokens, seed) for seed in range(options.contexts)]
    rows: list[dict[str, Any]] = []
    worker = AnswerWorker(model, tokenizer)
    held: dict[str, list[Context]] = {}
    about: dict[str, dict[str, Any]] = {}
    seconds: list[float] = []
    for method, retention in (("lkv", options.retention), ("full", 1.0)):
        held[method] = []
        for text in texts:
            started = time.perf_counter()
            held[method].append(compress(model, tokenizer, text, method="lkv", retention=retention, policy=policy))
            seconds.append(time.perf_counter() - started)
        realised = held[method][0].realised_retention()
        about[method] = {"method": method, "tokens": options.tokens, "retention": retention, "realised": realised}
        rows.append(throughput_row(worker, held[method], options.length, options.repeats, about[method]))
        rows += latency_rows(worker, held[method], options.length, options.concurrency, about[method])
    shares = [context.nbytes() / context.full_nbytes() for context in held["lkv"]]
    unit = "bytes held by those of full caches, mean of contexts"
    rows.append(ratio_row(about["lkv"], "memory", unit, "full", shares))
    room = int(1.2 * max(context.nbytes() for context in held["full"]))
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        compressed = Shelf(small, held["lkv"], texts, options.retention, room)
        shelves = {"lkv": compressed, "full": Shelf(large, held["full"], texts, 1.0, room)}
        loading = map(truediv, seconds[: options.contexts], compressed.load_seconds())
        unit = "time to compress by time to load, mean of contexts"
        rows.append(ratio_row(about["lkv"], "loading", unit, "compressing", [*loading]))
        held.clear()
        runs = {name: partial(shelf.answer_all, worker, options.length) for name, shelf in shelves.items()}
        took = interleaved(runs, options.repeats, warmups=0)
        unit = "requests a second by those of full caches in the same memory, mean of pairs"
        rows.append(ratio_row(about["lkv"], "same memory", unit, "full", [*map(truediv, took["full"], took["lkv"])]))
    worker.stop()
    save_rows(options, "serving", rows)


if __name__ == "__main__":
    main()
