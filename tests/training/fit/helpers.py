"""What the tests of `lkv fit` share."""

import torch

from lkv.hf.attention import patch_attention
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.data.samples import TokenizedSample
from lkv.training.warm_start import calibrate

TEXT = "The old mill by the river was sold in spring. Nobody knew who had bought it, but the lights came back. " * 40


def random_policy(model) -> Policy:
    torch.manual_seed(3)
    policy = Policy(patch_attention(model).spec, inputs=ScorerInputs("unrotated", "learned", 9))
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    calibrate(model, policy, [ids(1, 200), ids(2, 150)])
    return policy.requires_grad_(False)


def ids(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(seed: int) -> TokenizedSample:
    return TokenizedSample("random", ids(seed, 90), [(ids(seed + 50, 20), 8), (ids(seed + 60, 12), 0)])


def interrupt(*_):
    raise KeyboardInterrupt


def comparison_rows(kl):
    """Rows as `compare` returns them: `kl` has the KL of each method at R = 0.15 and 0.05."""
    return [
        {"method": name, "retention": retention, "texts": 1, "kl": value, "agreement": 0.5}
        for name, values in kl.items()
        for retention, value in zip((0.15, 0.05), values, strict=True)
    ]
