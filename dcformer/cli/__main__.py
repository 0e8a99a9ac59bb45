"""`python -m dcformer.cli`, the same as `dcformer`."""

from .main import main


main()
