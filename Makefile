.PHONY: test check

test:
	scripts/setup
	scripts/test

check:
	scripts/setup
	scripts/check
