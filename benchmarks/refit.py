"""`zerogap bench refit` from a checkout: what a refit costs in every transfer mode."""

from __future__ import annotations

import sys

from zerogap.cli import app

if __name__ == "__main__":
    sys.exit(app(["bench", "refit", *sys.argv[1:]]))
