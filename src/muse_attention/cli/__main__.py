"""`python -m muse_attention.cli` is `muse`."""

from muse_attention.cli import main

main()
