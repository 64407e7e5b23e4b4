"""Packages that only a part of the library needs, and how to get them."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The commands that install an extra of the package, from an index or from a clone."""
    return f"pip install 'muse-attention[{extra}]', in a clone pip install '.[{extra}]'"
