"""Three budget rules by three selectors (the paper's ablation) on the held-out continuations.

python -m experiments.grid --data FOLDER    (writes grid.json)
"""

from itertools import product

from experiments.fidelity import main

METHODS = ["+".join(parts) for parts in product(("uniform", "ada", "lkv-h"), ("snapkv", "expected", "lkv-t"))]

if __name__ == "__main__":
    main("grid", METHODS, contexts=4, code=1, doc=__doc__)
