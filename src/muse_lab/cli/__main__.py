"""`python -m muse_lab.cli` is `muse`."""

from muse_lab.cli import main

main()
