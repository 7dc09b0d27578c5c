# make demo      see VinePPO learn: set-up, SFT, training, held-out accuracy before and after
# make test      all tests (about five minutes)      make soak   the long trials     make quick   without engines
# make compare   every method, a grid of learning rates, three seeds; hours
# make compare-quick   one seed at the scripts' own learning rates; a quarter of an hour
# make figures   value accuracy, K, temperature, from the runs of either of these; three hours
# make diff A=ppo B=vineppo   two scripts side by side, as a page; any pair of them
# make bench     where an iteration's time goes, and against TRL; half an hour
# make gpu-check tests that need a GPU; ten minutes
# make install   the set-up alone: .venv with what this machine needs
PYTHON ?= python3

.PHONY: demo style quick test soak gpu-check install compare compare-quick figures diff bench
demo: .venv/installed
	.venv/bin/python -m recipes.demo

# two processes with one thread each
PYTEST = OMP_NUM_THREADS=1 TEST_THREADS=1 .venv/bin/python -m pytest -q -n 2

style: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

quick: style
	$(PYTEST) --dist worksteal -m "not soak and not slow"

# a file's tests share what an engine made; tests/conftest.py has the long files first
test: style
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "not soak"

soak: .venv/installed
	FUZZ_TIMES=40 .venv/bin/python -m pytest -q tests/test_fuzz.py
	.venv/bin/python -m pytest -q -s -m soak

gpu-check: .venv/installed
	@.venv/bin/python -m tests.gpu

compare: .venv/installed
	.venv/bin/python -m analysis.compare

compare-quick: .venv/installed
	.venv/bin/python -m analysis.compare --seeds 1 --no-grid --folder runs/quick --output runs/quick

figures: .venv/installed
	.venv/bin/python -m analysis.figures
	.venv/bin/python -m analysis.ablations

A = ppo
B = vineppo
diff: .venv/installed
	.venv/bin/python -m analysis.diff $(A) $(B)

bench: .venv/installed
	.venv/bin/python -m benchmarks.iteration --script vineppo
	.venv/bin/python -m benchmarks.iteration --script ppo
	.venv/bin/python -m benchmarks.iteration --script grpo
	.venv/bin/python -m benchmarks.iteration --script rloo
	.venv/bin/python -m benchmarks.rollouts
	.venv/bin/python -m benchmarks.against_trl

install: .venv/installed

.venv/installed: pyproject.toml $(wildcard install/*.py install/*/pyproject.toml)
	$(PYTHON) install/install.py
