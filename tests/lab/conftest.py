"""The tests of the laboratory run where its packages are installed."""

from __future__ import annotations

import importlib.util

_PACKAGES = ("transformers", "tokenizers", "typer", "rich", "matplotlib", "jinja2")

collect_ignore_glob = [] if all(map(importlib.util.find_spec, _PACKAGES)) else ["test_*.py"]
