"""`python -m dcformer.training`, also under `torchrun` or `accelerate launch` for several processes."""

from .command import main


main()
