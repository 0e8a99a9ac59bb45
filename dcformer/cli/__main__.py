"""`python -m dcformer.cli`, the same as `dcformer`."""

from . import main


if __name__ == "__main__":  # not in processes that vLLM starts, which import this module
    main()
