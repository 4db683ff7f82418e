"""`python -m daguerre` is `daguerre`."""

from daguerre.cli import main

main()
