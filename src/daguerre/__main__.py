"""`python -m daguerre` is `daguerre`."""

from daguerre.cli.main import main

main()
