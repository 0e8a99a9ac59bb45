"""`python -m dcformer.eval`, and under `accelerate launch -m dcformer.eval` on several devices."""

from ..cli.evaluate import main


# Not in the processes that vLLM starts, which import this module.
if __name__ == "__main__":
    main()
