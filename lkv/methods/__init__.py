"""Methods: a budget (how many tokens a head keeps) with a selector (which tokens), by name.

* `registry`: names, papers and requirements, without torch;
* `targets`: how much to keep, without torch;
* `base`: the interfaces of budgets and selectors, and what both are built from;
* `method`: `Method`, a budget and a selector for one model;
* `resolve`: `resolve_method`, which makes one of a name, a model and what to keep;
* `budgets`, `selectors`: the components, which register themselves;
* `compensation`: adjusts what was kept, by least squares.
"""
