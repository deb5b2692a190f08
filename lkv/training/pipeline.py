"""From settings to a finished policy."""

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lkv.config import PRESETS, ModelSpec, TrainingConfig, asdict, check_positions, fit_to_positions, num_knots, replace
from lkv.errors import LkvError, TrainingError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.sharding import sharded
from lkv.integrations.transformers.spec import hub_commit, inspect_model
from lkv.models.loading import DEFAULT, load_config, load_model, load_tokenizer
from lkv.models.shapes import Shape
from lkv.policy.policy import Policy
from lkv.training.checkpoint import CHECKPOINT, check_data, check_settings, initialize_from
from lkv.training.cost import estimate, format_duration
from lkv.training.data.build import BuiltDataset, is_built
from lkv.training.data.recipes import Mixture
from lkv.training.data.samples import TokenizedSample, tokenize_sample
from lkv.training.trainer import Trainer, require_samples
from lkv.training.warm_start import warm_start_from_kvzip, warm_start_from_policy
from lkv.utils.files import check_writable_folder

Data = Mixture | BuiltDataset
_RATED_TOKENS = 512  # of the text whose reading is timed


def describe_plan(config: TrainingConfig, shape: Shape, processes: int, started: bool = False) -> list[str]:
    """What a training will do and read, for people."""
    ratios = f"R {config.retention_start:g} to {config.retention_end:g}"
    if config.retention_high:
        ratios = f"R drawn from {config.retention_low:g} to {config.retention_high:g}"
    return [
        f"a policy for a model of {shape.layers} layers, {shape.parameters / 1e9:.2f} billion weights, {config.dtype}",
        f"{config.steps:,} steps of {config.batch} contexts in {processes} process{'es' if processes > 1 else ''}, "
        f"{config.min_tokens:,} to {config.max_tokens:,} tokens each; {ratios}, temperature {config.tau_start:g} to "
        f"{config.tau_end:g}, rate {config.lr:g} to {config.lr_end:g}",
        estimate(shape, config, processes=processes, started=started).line(),
    ]


def estimate_duration(model: Any, config: TrainingConfig) -> str:
    """How long a training of `model` would take in one process on this machine as it is now, for people."""
    shape = Shape.of(model.config)
    config = fit_to_positions(config, shape.positions)
    tokens = min(_RATED_TOKENS, config.max_tokens)
    return format_duration(estimate(shape, config, measured_rate(model, tokens), tokens).seconds or 0)


@torch.no_grad()
def measured_rate(model: Any, tokens: int) -> float:
    """Prompt tokens a second of `model`, once it is warm."""
    ids = torch.ones((1, tokens), dtype=torch.long, device=input_device(model))
    for _ in range(2):
        start = time.perf_counter()
        # A number of the result waits for the device.
        model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum().item()
        seconds = time.perf_counter() - start
    return tokens / seconds


def open_data(folder: Path, config: TrainingConfig, validation: bool = False) -> Data:
    """What is trained on: a folder that `lkv data build` wrote, or one of texts, code and data sets.

    Raises DataError for a folder that holds neither, TrainingError for a built one whose samples are longer than
    `config` takes: they would lose their ends.
    """
    if not is_built(folder):
        return Mixture(folder, config.min_tokens, config.max_tokens, config.seed, validation)
    built = BuiltDataset(folder, config.seed, validation)
    if built.max_tokens > config.max_tokens + config.max_continuation:
        raise TrainingError(
            f"{folder} was built for up to {built.max_tokens:,} tokens, but max_tokens is {config.max_tokens:,}; build "
            "it with a lower --max-tokens, or raise that of the training."
        )
    return built


def resolve_config(preset: str | None, given: dict[str, Any], positions: int) -> TrainingConfig:
    """The settings `given` over those of `preset`, for a model of `positions` positions.

    Without a preset: the paper's on a GPU, else the CPU's, cut to what the model can read. Raises TrainingError for
    settings that cannot be, and for lengths asked for that the model cannot read.
    """
    if preset is None:
        base = fit_to_positions(PRESETS["paper" if torch.cuda.is_available() else "cpu"], positions)
    else:
        base = PRESETS[preset]
    config = override(base, given)
    check_positions(config, positions)
    return config


def override(base: TrainingConfig, given: dict[str, Any]) -> TrainingConfig:
    """`base` with `given`; a longest context that is given alone takes the shortest down with it."""
    most = given.get("max_tokens")
    if isinstance(most, int) and 0 < most < base.min_tokens and "min_tokens" not in given:
        given = {**given, "min_tokens": max(1, most // 2)}
    return replace(base, **given)


def train_policy(
    preset: str | None,
    given: dict[str, Any],
    model_name: str | None,
    data: Path,
    out: Path,
    init: Path | None = None,
    revision: str | None = None,
    trackers: Sequence[Any] = (),
    spread: str = "no",
) -> Policy:
    """Train a policy, or resume its training, and save it under out/policy. Accelerate spreads it over processes.

    `given` are settings over those of `preset` (see `settings`). `init` is the folder of a policy or of another run
    whose weights this one starts from; `revision` a commit, tag or branch of a model on the hub. `trackers`: names
    that Accelerate knows ("tensorboard", "wandb", ...) or trackers of its kind, which are given every step's losses
    and every evaluation. `spread` is for a model larger than one GPU (see `placing.place`). What will be done and what
    it costs is told on stderr before it begins. Raises TrainingError where accelerate or a tracker is missing, settings
    cannot be or `out` takes no files, before the weights are loaded, and what `place` and `Trainer.run` raise.
    """
    try:
        from accelerate import Accelerator
        from accelerate.tracking import get_available_trackers
    except ImportError as error:
        raise TrainingError(
            f"training needs accelerate, which cannot be imported ({error}); run `pip install 'lkv-cache[train]'`."
        ) from error
    available = [str(kind) for kind in get_available_trackers()]
    if missing := [name for name in trackers if isinstance(name, str) and name not in available]:
        raise TrainingError(
            f"there is no tracker {missing[0]!r} here; install its package, or leave it out (here: "
            f"{', '.join(available) or 'none'})."
        )
    override(PRESETS[preset or "paper"], given)  # what is out of its range for any model is told first
    if not is_built(data) and _is_seen(out, data):
        raise TrainingError(f"{out} lies inside {data} and would be read as data; give an --out elsewhere.")
    check_writable_folder(out, TrainingError, "the training")
    shape = Shape.of(load_config(model_name or DEFAULT, revision))
    config = resolve_config(preset, given, shape.positions)
    resumed = (out / CHECKPOINT).exists()
    if resumed:
        check_settings(out, config)
    started = resumed or init is not None
    training = open_data(data, config)
    digest = training.digest
    if resumed:
        check_data(out, digest)
    # The same held-out samples for every seed, so that curves of different runs compare.
    held_out = open_data(data, replace(config, seed=0), validation=True)
    accelerator = Accelerator(log_with=list(trackers) or None, project_dir=out)
    if trackers:
        flat = {name: value for name, value in asdict(config).items() if isinstance(value, int | float | str | bool)}
        accelerator.init_trackers("lkv", config=flat)
    if accelerator.is_main_process:
        print(
            "\n".join([*training.lines, *describe_plan(config, shape, accelerator.num_processes, started)]),
            file=sys.stderr,
        )
    model, tokenizer = place_model(model_name or DEFAULT, getattr(torch, config.dtype), revision, spread, accelerator)
    rate, tokens = 0.0, min(_RATED_TOKENS, config.max_tokens)
    if accelerator.is_main_process or spread == "processes":
        rate = measured_rate(model, tokens)
    if accelerator.is_main_process:
        cost = estimate(shape, config, rate, tokens, accelerator.num_processes, started=started)
        print(f"this machine reads {rate:,.0f} tokens a second: {format_duration(cost.seconds or 0)}", file=sys.stderr)
    torch.manual_seed(config.seed)
    card: dict[str, Any] = {"model": model_name or DEFAULT, "data": training.origins, "training": asdict(config)}
    card |= {"trained_tokens": config.max_tokens, "data_digest": digest}
    if commit := hub_commit(model):
        card["revision"] = commit
    if isinstance(training, BuiltDataset):
        card["decontamination"] = training.decontamination
    policy = Policy(patch_attention(model).spec, card, config.inputs).to(input_device(model))
    earlier_policy = None
    if init is not None:
        before, earlier_policy = initialize_from(policy, init)
        card["started_from"] = before
        earlier = before.get("trained_tokens") or before.get("training", {}).get("max_tokens", 0)
        cut = config.position and config.inputs.knots < num_knots(max(1, earlier))  # of position terms
        if not cut:
            card["trained_tokens"] = max(config.max_tokens, earlier)

    def sample(mixture: Data, index: int) -> TokenizedSample:
        text = mixture.sample(index, config.continuations, config.tokens_a_continuation)
        return tokenize_sample(text, tokenizer, config.max_tokens, config.max_continuation)

    def warm_start() -> None:
        numbered = partial(sample, training)
        if earlier_policy is not None:
            warm_start_from_policy(model, earlier_policy, policy, numbered)
        elif config.warmup_contexts:
            warm_start_from_kvzip(model, tokenizer, policy, numbered, config.warmup_contexts, accelerator)

    validation = require_samples([sample(held_out, index) for index in range(config.validation_samples)])
    trainer = Trainer(
        model,
        policy,
        config,
        partial(sample, training),
        validation,
        out,
        accelerator,
        calibrated=init is not None and earlier_policy is None,
        warm_start=warm_start,
        sharded=spread == "processes",
    )
    trainer.run()
    if trackers:
        accelerator.end_training()
    if accelerator.is_main_process:
        policy.save_pretrained(out / "policy", half=True)
        print(f"the policy is in {out / 'policy'}")
    return policy


def _is_seen(out: Path, data: Path) -> bool:
    """Whether what is written to `out` would be among the files of `data`; hidden folders are not."""
    inside, outside = out.resolve(), data.resolve()
    return inside.is_relative_to(outside) and not any(p.startswith(".") for p in inside.relative_to(outside).parts)


def place_model(name: str, dtype: torch.dtype, revision: str | None, spread: str, accelerator: Any) -> tuple[Any, Any]:
    """(model, tokenizer) with LKV attached. `spread`: "no", the whole model in every process; "devices", over all GPUs
    of the one process of a machine; "processes", each with a share of every layer.

    Raises TrainingError where processes and `spread` do not go together, and what `load_model` raises.
    """
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
    if spread == "devices" and not alone:
        raise TrainingError(
            "a model that is spread over all GPUs leaves none to a second process of the machine; start one process, "
            "or give --spread processes."
        )
    if spread == "processes" and accelerator.num_processes == 1:
        raise TrainingError(
            "the model cannot be shared out over processes, as there is one; start several with `accelerate launch "
            "--num_processes N -m lkv train`, or give --spread devices."
        )
    if spread == "processes":
        return _shared_out(name, dtype, revision, accelerator)
    device = "auto" if spread == "devices" else accelerator.device
    # The first process of a node reads the disk; the others find the file in memory.
    with accelerator.local_main_process_first():
        model, tokenizer = load_model(name, dtype, revision, device)
    if spread == "no":
        model.to(accelerator.device)
    patch_attention(model)
    return model, tokenizer


def _shared_out(name: str, dtype: torch.dtype, revision: str | None, accelerator: Any) -> tuple[Any, Any]:
    """The first process alone loads the model, and sends each of the others its share."""
    from accelerate.utils import broadcast_object_list

    weights: dict[str, torch.Tensor] = {}
    told: list[ModelSpec | LkvError | None] = [None]
    if accelerator.is_main_process:
        try:
            whole, _ = load_model(name, dtype, revision)
            told, weights = [inspect_model(whole)], whole.state_dict()
        except LkvError as error:
            told = [error]  # the others wait for an answer
    spec = broadcast_object_list(told)[0]
    if isinstance(spec, LkvError):
        raise spec
    model = sharded(load_config(name, revision), dtype, weights, accelerator.device)
    patch_attention(model, spec)
    return model, load_tokenizer(name, revision)
