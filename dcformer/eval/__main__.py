"""`python -m dcformer.eval`, and under `accelerate launch -m dcformer.eval` on several devices."""

from .command import main


main()
