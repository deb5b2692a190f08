"""A service from the options of `lkv serve`."""

from pathlib import Path
from typing import Any

from lkv.integrations.transformers.attention import attach
from lkv.methods.registry import needs_policy
from lkv.models.loading import DEFAULT, cache_folder, fitting_policy, load_model, load_policy
from lkv.serving.service import Limits, Service
from lkv.utils.devices import on_device, torch_dtype


def make_service(options: dict[str, Any]) -> Service:
    """The service that the options of `lkv serve`, by name, describe. Raises what loading a model and a policy does."""
    name = options["model"] or DEFAULT
    model, tokenizer = load_model(name, torch_dtype(options["dtype"]), options["revision"])
    model = on_device(model, options["device"])
    policy = None
    if needs_policy(options["method"]):
        given = options["policy"] or None
        if given is not None:
            given = load_policy(given, options["strict"], options["policy_revision"])
        policy = fitting_policy(attach(model).spec, given)
    limits = Limits(
        options["max_upload"] * 2**20, options["max_requests"], options["max_texts"], options["max_tokens"],
        options["timeout"],
    )  # fmt: skip
    return Service(
        model, tokenizer, options["name"] or Path(name).name, options["store"] or str(cache_folder() / "contexts"),
        policy, options["method"], options["retention"], int(options["memory"] * 2**20), limits,
        pages=options["pages"],
    )  # fmt: skip
