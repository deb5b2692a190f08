"""Answer questions about a long document from 10% of its 16-bit KV cache's bytes, beside the full cache and SnapKV.

python -m examples.demo    (writes demo-output/summary.json and demo-output/budgets.png)
"""

import time
from pathlib import Path
from typing import Any

import torch

from examples.document import NOTES, document
from experiments.result_file import write_results
from lkv import Context, compress, default_policy, load_default
from lkv.cli.inspect import draw_budgets

OUT = Path("demo-output")
MEMORY = 0.1
# LKV spends its bytes on tiers of precision; SnapKV, as published, on entries of the model's dtype, here float32.
OPTIONS: dict[str, dict[str, Any]] = {"full": {}, "lkv": {"memory": MEMORY}, "snapkv": {"retention": MEMORY / 2}}


def measure(context: Context, seconds: float, reference: list[str], method: str) -> tuple[list[dict], list[str]]:
    """Rows for the summary: each answer, then bytes, times and agreement with the full cache's answers."""
    rows, answers, nbytes = [], [], context.nbytes()
    started = time.perf_counter()
    written = 0
    for _, _, question, answer in NOTES:
        text = context.ask(question, max_new_tokens=24)
        written += context.answer_tokens
        answers.append(text)
        correct = answer.lower() in text.lower()
        rows.append({"method": method, "question": question, "correct": correct, "answer": text})
    per_token = (time.perf_counter() - started) / written * 1000
    agreement = []
    for (_, _, question, _), reply in zip(NOTES, reference or answers, strict=True):
        logits, ids = context.predict(question, reply)
        agreement.append(float((logits.argmax(-1) == ids).float().mean()))
    shared = {"method": method, "tokens": context.tokens, **OPTIONS[method]}
    shared["realised"] = context.realised_retention()
    for name, value, unit in (
        ("cache", nbytes, "bytes of k and v held"),
        ("prefill", seconds, "seconds"),
        ("answering", per_token, "milliseconds a token"),
        ("agreement", sum(agreement) / len(agreement), "share of the full cache's tokens predicted"),
    ):
        rows.append(shared | {"name": name, "value": value, "unit": unit})
    return rows, answers


def main() -> None:
    torch.manual_seed(0)
    model, tokenizer = load_default()
    text = document(tokenizer)
    compress(model, tokenizer, text[:2000]).ask("What is this about?", max_new_tokens=2)  # warm-up
    rows: list[dict] = []
    reference: list[str] = []
    for method in OPTIONS:
        started = time.perf_counter()
        context = compress(model, tokenizer, text, method=method, **OPTIONS[method])
        seconds = time.perf_counter() - started
        measured, answers = measure(context, seconds, reference, method)
        reference = reference or answers
        rows += measured
        title = {"full": "full cache", "lkv": f"LKV, memory = {MEMORY}", "snapkv": "SnapKV, as many bytes"}[method]
        values = {row["name"]: row["value"] for row in measured if "name" in row}
        print(f"\n{title}: {context.tokens} tokens, {values['cache']:,} bytes of k and v in "
              f"{context.realised_retention():.2f} of the entries, prefill "
              f"{values['prefill']:.1f} s, {values['answering']:.0f} ms a token, "
              f"agreement with the full cache {values['agreement']:.2f}")  # fmt: skip
        for row in measured:
            if "question" in row:
                print(f"  {'right' if row['correct'] else 'WRONG'}  {row['question']}  ->  {row['answer']!r}")
    policy = default_policy()
    draw_budgets(policy.inference_ratios(MEMORY).tolist(), MEMORY, OUT / "budgets.png")
    write_results(OUT / "summary.json", "demo", rows, seed=0, command="make demo")
    print(f"\n{OUT}/summary.json and {OUT}/budgets.png were written.")


if __name__ == "__main__":
    main()
