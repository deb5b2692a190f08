"""From a command line's settings to a finished policy: model, data, trainer and card put together."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lkv.config import TrainingConfig, asdict
from lkv.errors import TrainingError
from lkv.files import check_folder
from lkv.host.attention import attach
from lkv.host.stock import commit_of
from lkv.models import DEFAULT, load_model
from lkv.policy import Policy
from lkv.training.checkpoint import start_from
from lkv.training.data.mixture import Mixture
from lkv.training.data.sample import TokenizedSample, tokenize
from lkv.training.trainer import Trainer, require_samples
from lkv.training.warm_start import carry_over, imitate_kvzip


def train_policy(
    config: TrainingConfig,
    model_name: str | None,
    data: Path,
    out: Path,
    init: Path | None = None,
    revision: str | None = None,
    trackers: Sequence[Any] = (),
) -> Policy:
    """Train a policy, or resume its training, and save it under out/policy. Accelerate spreads it over processes.

    `init` is the folder of a policy or of another run whose weights this one starts from; `revision` a commit, tag or
    branch of a model on the hub. `trackers`: names that Accelerate knows ("tensorboard", "wandb", ...) or trackers of
    its kind, which are given every step's losses and every evaluation. Raises TrainingError where accelerate or a
    tracker is missing or `out` takes no files, before
    anything is loaded, and what `Trainer.run` raises.
    """
    try:
        from accelerate import Accelerator
        from accelerate.tracking import get_available_trackers
    except ImportError as error:
        raise TrainingError(
            f"training needs accelerate, which cannot be imported ({error}); run `pip install 'lkv-cache[train]'`."
        ) from error
    there = [str(kind) for kind in get_available_trackers()]
    if missing := [name for name in trackers if isinstance(name, str) and name not in there]:
        raise TrainingError(
            f"there is no tracker {missing[0]!r} here; install its package, or leave it out (here: "
            f"{', '.join(there) or 'none'})."
        )
    check_folder(out, TrainingError, "the training")
    training = Mixture(data, config.min_tokens, config.max_tokens, config.seed)
    # The same held-out samples for every seed, so that curves of different runs compare.
    held_out = Mixture(data, config.min_tokens, config.max_tokens, validation=True)
    accelerator = Accelerator(log_with=list(trackers) or None, project_dir=out)
    if trackers:
        flat = {name: value for name, value in asdict(config).items() if isinstance(value, int | float | str | bool)}
        accelerator.init_trackers("lkv", config=flat)
    model, tokenizer = load_model(model_name or DEFAULT, getattr(torch, config.dtype), revision)
    model.to(accelerator.device)
    torch.manual_seed(config.seed)
    card: dict[str, Any] = {"model": model_name or DEFAULT, "data": training.origins, "training": asdict(config)}
    card["trained_tokens"] = config.max_tokens
    if commit := commit_of(model):
        card["revision"] = commit
    policy = Policy(attach(model).spec, card, config.inputs).to(accelerator.device)
    earlier_policy = None
    if init is not None:
        before, earlier_policy = start_from(policy, init)
        card["started_from"] = before
        earlier = before.get("trained_tokens") or before.get("training", {}).get("max_tokens", 0)
        card["trained_tokens"] = max(config.max_tokens, earlier)

    def sample(mixture: Mixture, index: int) -> TokenizedSample:
        text = mixture.sample(index, config.continuations, config.tokens_a_continuation)
        return tokenize(text, tokenizer, config.max_tokens, config.max_continuation)

    def warm_start() -> None:
        numbered = partial(sample, training)
        if earlier_policy is not None:
            carry_over(model, earlier_policy, policy, numbered)
        elif config.imitated:
            imitate_kvzip(model, tokenizer, policy, numbered, config.imitated, accelerator)

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
    )
    trainer.run()
    if trackers:
        accelerator.end_training()
    if accelerator.is_main_process:
        policy.save_pretrained(out / "policy", half=True)
        print(f"the policy is in {out / 'policy'}")
    return policy
