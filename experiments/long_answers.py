"""Long answers in bounded memory: KL(full || bounded) by position in the answer, each method in the same bytes.

python -m experiments.long_answers --data FOLDER    (FOLDER is the evaluation folder; writes long_answers.json)

The full cache's own answer is drawn once, at a temperature of 0.8. Each method then reads prompt and answer with
`decode_eviction`, as many tokens at a time as it has free slots. Its bound is a share of the full cache's bytes at the
end of the answer, in 16 bits a value. Methods are in tiers, or in 16 bits where their name says so, which count as 16
also where the model computes in float32. The queries that SnapKV, TOVA and R-KV observe are held beyond the bound.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.common import SUBJECT, Subject, parse_options, run_cases, subject_of
from experiments.fidelity import fidelity_row
from experiments.heldout import HeldOut
from experiments.memory import TABLES, own_share
from lkv.cache.cache_config import CacheConfig
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.methods.targets import KVShape
from lkv.utils.fidelity import is_top1_equal, kl_divergence
from lkv.utils.prompts import encode_question

METHODS = ["lkv", "lkv (16 bits)", *(f"{name} (16 bits)" for name in ("snapkv", "r-kv", "tova", "streaming-llm"))]
REQUESTS = {
    "stories": "Tell the whole story again in your own words, with every detail, then go on with it.",
    "meetings": "Write minutes of this meeting, point by point, with all details and who said what.",
    "prose QA": "Explain all of this in full detail to a beginner, with examples.",
    "code": "Go on with this program: write the rest of it, with comments.",
}
THIRDS = ("first third", "second third", "last third")
_BLOCK = 256  # tokens whose log-probabilities are in memory at a time
Sample = dict[str, Any]


def main() -> None:
    options = parse_options(
        __doc__, "long_answers", "of evaluation files", **SUBJECT, methods=METHODS, tasks=tuple(REQUESTS), prompt=400,
        answer=700, memory=[0.25, 0.125], contexts=1, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options)
    options.out = options.out or subject.results("long_answers")
    heldout = HeldOut(options.data, subject.tokenizer, options.seed)
    cases = {f"{task}-{number}": (task, number) for number in range(options.contexts) for task in options.tasks}
    rows = [(method, memory) for memory in options.memory for method in options.methods]

    def measure_case(task: str, number: int) -> Sample:
        context, _ = heldout.case(task, number, options.prompt)
        prompt = context + encode_question(subject.tokenizer, REQUESTS[task])
        torch.manual_seed(options.seed * 1000 + number)
        return measure(subject, prompt, draw_answer(subject.model, prompt, options.answer), rows)

    run_cases(
        "experiments.long_answers", options, "long_answers", cases, measure_case,
        lambda samples: [{"model": subject.name, **row} for row in summarise(samples.values())], subject.policy,
        ["contexts", "tasks"],
    )  # fmt: skip


def draw_answer(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """An answer of exactly `tokens` tokens, drawn from the full cache's predictions."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=0.8, top_k=0,
        top_p=0.95,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def measure(subject: Subject, prompt: list[int], answer: list[int], rows: list[tuple[str, float]]) -> Sample:
    """KL and agreement over each third of the answer, and the share of bytes that each method held at most."""
    model, ids = subject.model, torch.tensor([prompt + answer])
    expected = model.base_model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
    spec = patch_attention(model).spec
    full_nbytes = KVShape(spec.layers * spec.kv_heads, spec.head_dim, 2).reference_nbytes(ids.shape[1])
    sample: Sample = {"tokens": len(prompt), "answer": len(answer), "rows": rows, "held": []}
    measured = []
    for method, memory in rows:
        nbytes = memory * own_share(method, model.dtype) * full_nbytes
        hidden, held = read_bounded(subject, method, int(nbytes), ids, len(prompt))
        sample["held"].append(held / nbytes * memory)
        blocks = zip(expected.split(_BLOCK), hidden.split(_BLOCK), strict=True)
        figures = torch.cat([_compare(model, *pair) for pair in blocks])
        measured.append([third.mean(0).tolist() for third in figures.chunk(len(THIRDS))])
    return sample | {"measured": [[row[part] for row in measured] for part in range(len(THIRDS))]}


def read_bounded(subject: Subject, name: str, nbytes: int, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Read prompt and answer in `nbytes`: the states before each token of the answer, and the most bytes held."""
    method, _, precision = name.partition(" (")
    request = CompressionRequest(method=method, memory=nbytes, policy=subject.policy, decode_eviction=True)
    resolved = resolve_method(request, subject.model, tier_table=TABLES[precision.rstrip(")")])
    cache = RaggedCache.from_config(subject.model, CacheConfig(resolved, request))
    read = partial(subject.model.base_model, past_key_values=cache, use_cache=True)
    states, held = [read(input_ids=ids[:, :start])[0][0, -1:]], 0
    store = cache.ragged_layers[0].store
    assert store is not None
    for part in ids[:, start:-1].split(store.free_slots, 1):
        states.append(read(input_ids=part)[0][0])
        held = max(held, cache.nbytes())
    return torch.cat(states), held


def _compare(model: Any, expected: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """KL and agreement [n, 2] of the predictions from final states."""
    full, bounded = (torch.log_softmax(model.lm_head(states).float(), -1) for states in (expected, hidden))
    return torch.stack([kl_divergence(full, bounded), is_top1_equal(full, bounded).float()], -1)


def summarise(samples: Iterable[Sample]) -> list[dict]:
    """Rows by memory, method and part of the answer ("all" for the whole)."""
    samples, rows = list(samples), []
    for index, (method, memory) in enumerate(samples[0]["rows"]):
        for part, third in [("all", slice(None)), *((name, slice(i, i + 1)) for i, name in enumerate(THIRDS))]:
            row = {"method": method, "memory": memory, "part": part, "answer": samples[0]["answer"]}
            row["held"] = sum(sample["held"][index] for sample in samples) / len(samples)
            row |= fidelity_row([({"measured": sample["measured"][third]}, index) for sample in samples])
            rows.append(row)
        print(f"{method:22} memory {memory:5} held {row['held']:.4f} last third kl {row['kl']:.4f}")
    return rows


if __name__ == "__main__":
    main()
