.PHONY: demo test check

demo:
	scripts/setup
	.venv/bin/zerogap train examples/quickstart.toml

test:
	scripts/setup
	scripts/test

check:
	scripts/setup
	scripts/check
