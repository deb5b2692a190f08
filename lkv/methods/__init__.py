"""Methods: a budget (how many tokens a head keeps) with a selector (which tokens), by name.

* `registry`: names, papers and requirements, without torch;
* `method`: `Method` and `resolve_method`, which makes one of a name, a model and what to keep;
* `budgets`, `selectors`: the components, which register themselves;
* `compensation`: adjusts what was kept, by least squares.
"""
