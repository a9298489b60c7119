"""`python -m vit_memory` is the command."""

from vit_memory.cli import main

main()
