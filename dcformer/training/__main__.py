"""`python -m dcformer.training`, also under `torchrun` or `accelerate launch` for several processes."""

from ..cli.train import main


main()
