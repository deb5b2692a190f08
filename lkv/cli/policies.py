"""lkv policies: list the shipped policies, or what is available for one model."""

from lkv.cli.arguments import Command, option
from lkv.policy.shipped import ShippedPolicy, describe_card, shipped_policies

_TRAIN = "lkv train --preset cpu --model {} --data FOLDER --out FOLDER"


class Policies(Command):
    """List the shipped policies: models, training, fidelity."""

    model: str | None = option("show what is available for this folder, GGUF file or Hub id (default: list all)")

    def run(self) -> None:
        """Print one paragraph per policy, or what is available for one model."""
        if self.model:
            print(_describe_model(self.model))
            return
        for policy in shipped_policies():
            print(_describe_policy(policy) + "\n")
        print(
            f"Other models: `lkv methods` lists the methods that need no policy; `{_TRAIN.format('NAME')}` trains one; "
            "`lkv policies --model NAME` estimates how long that takes."
        )


def _describe_model(name: str) -> str:
    """Load a model, which policies recognise by its weights, and describe its policies or the alternatives."""
    from lkv.cli.options import find_needs
    from lkv.config import PRESETS
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.registry import POLICY, methods
    from lkv.models.loading import load_model
    from lkv.policy.model_match import model_difference
    from lkv.training.pipeline import estimate_duration

    model, tokenizer = load_model(name)
    spec = patch_attention(model).spec
    matching = [policy for policy in shipped_policies() if model_difference(policy.spec, spec) is None]
    if matching:
        return "\n\n".join(map(_describe_policy, matching))
    free = ", ".join(method for method in methods() if POLICY not in find_needs(method))
    times = {preset: estimate_duration(model, tokenizer, PRESETS[preset]) for preset in ("cpu", "paper")}
    return (
        f"No policy is shipped for {name} ({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads).\n"
        f"  methods   without a policy: {free}\n"
        f"  training  `{_TRAIN.format(name)}`, {times['cpu']} on this machine at its present load ({times['paper']} "
        "with --preset paper)"
    )


def _describe_policy(policy: ShippedPolicy) -> str:
    return "\n".join([policy.name, *(f"  {line}" for line in describe_card(policy.spec, policy.card))])


COMMAND = Policies
