"""`python -m fastlaunch`."""

from fastlaunch.cli import main

main()
