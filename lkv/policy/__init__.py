"""The learned policy: LKV-H and LKV-T, and how policies are stored, found and shared.

* `policy`: the `Policy` of one model, with LKV-H, whose scores give the budgets, and its files;
* `score_formula`, `token_scores`: LKV-T, its formula and its weights;
* `hub`: uploading with a model card;
* `lookup`, `model_match`: find a policy, and check that it is for this model;
* `shipped`, `checkpoints`: the policies that come with the package.
"""
