"""`python -m fastlaunch`."""

from fastlaunch.cli.main import main

main()
