"""`python -m dcformer.eval`, and under `accelerate launch -m dcformer.eval` on several devices."""

from ..cli.evaluate import main


main()
