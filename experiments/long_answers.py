"""Long answers in bounded memory: KL(full || bounded) by position in the answer, each method in the same bytes.

python -m experiments.long_answers --data FOLDER    (FOLDER is the evaluation folder; writes long_answers.json)

The full cache's own answer is drawn once, at a temperature of 0.8. Each method then reads prompt and answer with
`decode_eviction`, as many tokens at a time as it has free slots. Its bound is a share of the bytes of the full 16-bit
cache at the end of the answer; entries in 16 bits count so in float32, too. Queries that methods observe come on top.
"""

from functools import partial
from pathlib import Path

import torch

from experiments.common import SUBJECT, Subject, parse_options, run_samples, subject_of
from experiments.fidelity import fidelity_row, kl_and_agreement
from experiments.heldout import HeldOut
from experiments.memory import TABLES, Sample, own_share
from lkv.cache.cache_config import CacheConfig
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.methods.targets import KVShape
from lkv.utils.prompts import encode_question

METHODS = ["lkv", "lkv (16 bits)", *(f"{name} (16 bits)" for name in ("snapkv", "r-kv", "tova", "streaming-llm"))]
REQUESTS = {
    "stories": "Tell the whole story again in your own words, with every detail, then go on with it.",
    "meetings": "Write minutes of this meeting, point by point, with all details and who said what.",
    "prose QA": "Explain all of this in full detail to a beginner, with examples.",
    "code": "Go on with this program: write the rest of it, with comments.",
}
PARTS = ("first", "second", "last")  # thirds of the answer


def main() -> None:
    options = parse_options(
        __doc__, "long_answers", "of evaluation files", **SUBJECT, methods=METHODS, tasks=tuple(REQUESTS), prompt=400,
        answer=700, memory=[0.25, 0.125], contexts=1, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options, "long_answers")
    heldout = HeldOut(options.data, subject.tokenizer, options.seed)
    cases = {f"{task}-{number}": (task, number) for number in range(options.contexts) for task in options.tasks}
    rows = [(method, memory) for memory in options.memory for method in options.methods]

    def measure_case(task: str, number: int) -> Sample:
        context, _ = heldout.case(task, number, options.prompt)
        prompt = context + encode_question(subject.tokenizer, REQUESTS[task])
        torch.manual_seed(options.seed * 1000 + number)
        return measure(subject, prompt, options.answer, rows)

    run_samples("long_answers", options, cases, measure_case, summarise, subject, "contexts tasks")


@torch.no_grad()
def measure(subject: Subject, prompt: list[int], tokens: int, rows: list[tuple[str, float]]) -> Sample:
    """KL and agreement over each third of an answer of `tokens` tokens, and the share of bytes held at most."""
    model, start = subject.model, len(prompt)
    drawn = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, **drawn)
    expected, spec = model.base_model(input_ids=ids)[0][0, start - 1 : -1], patch_attention(model).spec
    full_nbytes = KVShape(spec.layers * spec.kv_heads, spec.head_dim, 2).reference_nbytes(ids.shape[1])
    sample: Sample = {"tokens": start, "answer": tokens, "rows": rows, "held": []}
    measured = []
    for method, memory in rows:
        nbytes = memory * own_share(method, model.dtype) * full_nbytes
        hidden, held = read_bounded(subject, method, int(nbytes), ids, start)
        sample["held"].append(held / nbytes * memory)
        thirds = zip(expected.chunk(len(PARTS)), hidden.chunk(len(PARTS)), strict=True)
        pairs = ([torch.log_softmax(model.lm_head(x).float(), -1) for x in pair] for pair in thirds)
        measured.append([kl_and_agreement(*pair) for pair in pairs])
    return sample | {"measured": list(zip(*measured, strict=True))}


def read_bounded(subject: Subject, name: str, nbytes: int, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Read prompt and answer in `nbytes`: the states before each token of the answer, and the most bytes held."""
    method, _, precision = name.partition(" (")
    request = CompressionRequest(method=method, memory=nbytes, policy=subject.policy, decode_eviction=True)
    resolved = resolve_method(request, subject.model, tier_table=TABLES[precision.rstrip(")")])
    cache = RaggedCache.from_config(subject.model, CacheConfig(resolved, request))
    read = partial(subject.model.base_model, past_key_values=cache, use_cache=True)
    states, held = [read(input_ids=ids[:, :start])[0][0, -1:]], 0
    for part in ids[:, start:-1].split(cache.config.budgeted_slots([start]) or 1, 1):
        states.append(read(input_ids=part)[0][0])
        held = max(held, cache.nbytes())
    return torch.cat(states), held


def summarise(samples: list[Sample]) -> list[dict]:
    """Rows by memory, method and part of the answer ("all" for the whole)."""
    rows = []
    for index, (method, memory) in enumerate(samples[0]["rows"]):
        for part, third in (("all", slice(None)), *((name, slice(i, i + 1)) for i, name in enumerate(PARTS))):
            row = {"method": method, "memory": memory, "part": part, "answer": samples[0]["answer"]}
            row["held"] = sum(sample["held"][index] for sample in samples) / len(samples)
            row |= fidelity_row([({"measured": sample["measured"][third]}, index) for sample in samples])
            rows.append(row)
            print(f"{method:22} memory {memory:5} {part:6} held {row['held']:.4f} kl {row['kl']:.4f}")
    return rows


if __name__ == "__main__":
    main()
