"""Methods: a budget (how many tokens each head keeps) combined with a selector (which tokens), by name.

* `registry`: names, papers and requirements, without torch;
* `targets`: how much to keep, without torch;
* `base`: the interfaces and inputs of budgets and selectors;
* `method`: `Method`, a budget and a selector for one model;
* `request`: `CompressionRequest`, what a user asks for, and `resolve_method`, which builds its `Method`;
* `budgets`, `selectors`: the components, which register themselves;
* `compensation`: adjusts the kept values by least squares.
"""
