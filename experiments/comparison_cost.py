"""What comparing several methods costs, as a share of the full cache alone on the same samples (RULER).

python -m experiments.comparison_cost --data EVAL_FOLDER    (writes comparison_cost.json)

Every call measures anew: times of another machine, day or number of threads do not count.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from experiments.bootstrap import bootstrap_ratio
from experiments.common import parse_options, save_rows, wall_clock
from lkv.evaluation import ruler
from lkv.evaluation.comparison import generate_greedily
from lkv.evaluation.example import make_prompt
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.journal import read_samples

_SEVEN = ("lkv", "snapkv", "pyramidkv", "adakv-snapkv", "adakv-expected", "criticalkv", "keydiff")
_SETS = {"eight methods of one pass": (*_SEVEN, "tova"), "seven of them and KVzip": (*_SEVEN, "kvzip")}


def main() -> None:
    options = parse_options(
        __doc__, "comparison_cost", "with RULER's sources", tokens=[2048, 4096], samples=1,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    model, tokenizer = load_default(torch.bfloat16)
    sources = ruler.Sources.from_folder(options.data)
    rows = []
    for tokens in options.tokens:
        examples = [
            example
            for task in ruler.TASKS
            for example in ruler.make_examples(task, tokens, options.samples, tokenizer, sources, 0)
        ]
        for name, methods in _SETS.items():
            config = EvaluationConfig(methods, [0.15], policy=default_policy())
            with tempfile.TemporaryDirectory() as folder:
                lines = Path(folder) / "samples.jsonl"
                evaluate(model, tokenizer, examples, config, lines)
                samples = read_samples(lines)[1]
            seconds = {part: [sample["seconds"][part] for sample in samples] for part in ("prefill", "methods")}
            seconds["full"] = []
            for example in examples:  # with transformers' own cache
                prompt = make_prompt(example, tokenizer, "kvpress", model.config.max_position_embeddings)
                ids = [prompt.context + prompt.question]
                seconds["full"].append(wall_clock(partial(generate_greedily, model, ids, example.max_new_tokens)))
            whole = map(sum, zip(seconds["prefill"], seconds["methods"], strict=True))
            ratio = bootstrap_ratio([[own] for own in whole], [[full] for full in seconds["full"]])
            row = {"methods": name, "tokens": tokens, "threads": options.threads, **ratio._asdict(), "baseline": "full"}
            row |= {"unit": "time of the whole comparison by that of the full cache alone, reading and answering"}
            rows.append(row | {f"{part}_seconds": sum(each) / len(each) for part, each in seconds.items()})
            print(rows[-1], flush=True)
    save_rows(options, "comparison_cost", rows)


if __name__ == "__main__":
    main()
