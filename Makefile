# Verbs only: what each does is in build.py. All of them first make the machine ready (tools/setup), which takes some
# milliseconds when it is. What they take, as `make help` shows it:
#   ARCH=gfx1151      the arch; without it the GPU found here, else cpu
#   PRESET=NAME       the preset of a model: `make presets` lists all
#   ARGS='--json'     more flags: --json, --dry-run, --debug, -q for any verb; `make plan ARGS=--help` shows a verb's own
#   CMD='COMMAND'     what exec runs in an engine's container
#   DO=pull REF=NAME  what seed does, and with which seed
#   KIND=compose      what file emit makes
#   FILE=vllm.log     the file that phases reads; the one that render and emit write
#   MARK='not net'    which tests pytest picks
ARCH ?=
FILE ?=
ARGS ?=
MARK ?= not device

# A word without its variable is no goal, and a name in small letters no variable.
goals := $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)
stray := $(filter-out $(goals),$(MAKECMDGOALS))
verb  := $(firstword $(filter $(goals),$(MAKECMDGOALS)))
do    := $(if $(filter seed,$(firstword $(MAKECMDGOALS))),$(filter make push pull verify ls,$(word 2,$(MAKECMDGOALS))))
arch_ := $(firstword $(filter cpu gfx% GFX% CPU,$(stray)))
named := $(if $(filter up down logs exec watch presets emit,$(verb)),$(firstword $(filter-out $(arch_),$(stray))))
ifneq ($(stray)$(do),)
$(if $(do)$(arch_)$(named),,$(error there is no verb $(firstword $(stray)): make help lists all))
$(error did you mean make $(or $(verb),image)$(if $(do), DO=$(do))$(if $(arch_), ARCH=$(arch_))$(if $(named), PRESET=$(named))?)
endif
$(foreach name,arch preset args cmd do ref kind file mark,$(if $(filter command,$(origin $(name))),\
	$(error did you mean $(shell echo $(name) | tr a-z A-Z)=$(value $(name))?)))

python := .venv/bin/python
build  := $(python) build.py
pytest := $(python) -m pytest -m "$(MARK)"
dry    := $(filter --dry%,$(ARGS))# then what is missing is only told, but for what build.py itself needs
setup  := tools/setup$(if $(dry), --plan)
compile = UV_CUSTOM_COMPILE_COMMAND='make requirements' .venv/bin/uv pip compile --quiet --universal --generate-hashes \
	--python-version 3.11 --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml

# ---- images -------------------------------------------------------------------------------------------------------
archs:   ready         ## the profiles: lane, versions, hardware-validated or not
	@$(build) archs $(ARGS)
plan:    ready         ## what would be built, and where each value comes from
	@$(build) plan $(ARCH) $(ARGS)
explain: ready         ## what changed since the last build, and which layers that rebuilds
	@$(build) explain $(ARCH) $(ARGS)
render:  ready         ## the Containerfile (FILE=… to write it there)
	@$(build) render $(ARCH) $(if $(FILE),-o $(FILE)) $(ARGS)
lock:    ready-engine  ## resolve all versions and hashes (ARGS=--check to verify them)
	@$(build) lock $(ARCH) $(ARGS)
image:   ready-engine  ## build the image
	@$(build) image $(ARCH) $(ARGS)
verify:  ready-all     ## run the image tests and write their record
	@$(build) verify $(ARCH) $(ARGS)
smoke:   verify        ## the same as verify
size:    ready-engine  ## the image by layer and component, against its budget
	@$(build) size $(ARCH) $(ARGS)
rehearse: ready-all    ## build and test an arch's image with stand-ins for what the network can't reach (ARGS=--all)
	@$(build) rehearse $(ARCH) $(ARGS)
patches-check: ready   ## apply all patches to the sources they are for
	@$(build) patches-check $(ARGS)
seed:    ready-engine  ## caches as images: DO=make (ARCH), push, pull, verify (REF=the seed's name), ls
	@$(build) seed $(or $(DO),ls) $(if $(REF),$(REF) $(if $(ARCH),--arch $(ARCH)),$(ARCH)) $(ARGS)
prune:   ready-engine  ## free old images, caches and build caches
	@$(build) prune $(ARGS)
bench-doctor: ready-engine ## is the GPU's clock to be trusted, by which kernels are tuned
	@$(build) bench-doctor $(ARCH) $(ARGS)
doctor:  ready         ## what is wrong with this machine for an image, with a remedy each (ARGS='--image REF')
	@$(build) doctor $(ARGS)
phases:  ready         ## a saved vLLM log as phases with seconds (FILE=vllm.log)
	@$(if $(FILE)$(filter -h --help,$(ARGS)),,$(error which log? make phases FILE=vllm.log))$(build) phases $(FILE) $(ARGS)
presets: ready         ## presets of models, or one of them whole (PRESET=…)
	@$(build) presets $(PRESET) $(ARGS)
emit:    ready         ## a preset as a file: KIND=quadlet, compose, llama-swap or distrobox (PRESET=…, FILE=…)
	@$(if $(KIND)$(filter -h --help,$(ARGS)),,$(error which kind? make emit KIND=quadlet PRESET=…))$(build) emit $(KIND) $(PRESET) $(if $(FILE),-o $(FILE)) $(ARGS)

# ---- engines ------------------------------------------------------------------------------------------------------
up:      ready-engine  ## serve a model, its phases shown until it is ready (PRESET=…, ARGS='--set key=value')
	@$(build) up $(PRESET) $(ARGS)
down:    ready-engine  ## stop an engine, and see that its memory came back
	@$(build) down $(PRESET) $(ARGS)
status:  ready         ## engines, devices and memory
	@$(build) status $(ARGS)
logs:    ready         ## an engine's log (ARGS=-f to follow it)
	@$(build) logs $(PRESET) $(ARGS)
exec:    ready-engine  ## a command in an engine's container (CMD='vllm --version', PRESET=…)
	@$(build) exec $(PRESET) -- $(CMD)
watch:   ready-engine  ## watch an engine's memory until it ends; up starts this by itself (PRESET=…)
	@$(build) watch $(PRESET) $(ARGS)
gpu-check: ready-engine ## launch a kernel in the image: does the GPU run its device code?
	@$(build) gpu-check $(ARCH) $(ARGS)

# ---- this project -------------------------------------------------------------------------------------------------
test:    ready-all     ## everything: lint, types, unit, engine and image tests
	@$(pytest) tests/lint tests/unit tests/golden tests/engine
	@$(MAKE) --no-print-directory test-image
lint:    ready-test    ## linters and types
	@$(pytest) tests/lint
unit:    ready-test    ## tests that start no process and open no socket
	@$(pytest) tests/unit tests/golden
test-engine: ready-all ## tests on real buildah and podman
	@$(pytest) tests/engine
test-image:  ready-all ## build the cpu image, then test it
	@$(build) image cpu
	@$(build) verify cpu
requirements: ready    ## resolve requirements*.txt anew from pyproject.toml (ARGS=--upgrade)
	@$(compile) --output-file requirements.txt $(ARGS)
	@$(compile) --output-file requirements-test.txt --extra test $(ARGS)
clean:                 ## remove .venv and what the tools cached here; images and .warmstart stay
	@rm -rf .venv .venv.new .venv.old .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.warmstart/*' -prune -exec rm -rf {} +
help:                  ## this list
	@awk -F ' *## ' '/^[a-z-]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@sed -n 's/^#   /  /p' Makefile

# ---- the machine --------------------------------------------------------------------------------------------------
ready:
	@tools/setup run
ready-engine: $(if $(dry),ready)
	@$(setup) run engine
ready-test: $(if $(dry),ready)
	@$(setup) test
ready-all: $(if $(dry),ready)
	@$(setup) test engine

.DEFAULT_GOAL := help
.PHONY: $(goals)
