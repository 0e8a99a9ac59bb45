"""`python -m dcformer.cli`, the same as `dcformer`."""

from .main import main


# Not in the processes that vLLM starts, which import this module.
if __name__ == "__main__":
    main()
