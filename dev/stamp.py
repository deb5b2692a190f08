"""Describe the model of policies anew: what they know it by is read from its weights; nothing else changes.

python dev/stamp.py MODEL FOLDER...    (MODEL as `lkv ask --model` takes it, of which the policies must be)
"""

import sys

from lkv.integrations.transformers.attention import patch_attention
from lkv.models.loading import load_model
from lkv.policy.policy import Policy


def main() -> None:
    spec = patch_attention(load_model(sys.argv[1])[0]).spec
    for folder in sys.argv[2:]:
        policy = Policy.from_pretrained(folder)
        policy.check_model(spec)
        policy.spec = spec
        policy.save_pretrained(folder, half=True)
        print(f"{folder} knows {sys.argv[1]} by {len(spec.directions)} stretches of its weights")


if __name__ == "__main__":
    main()
