"""The `dcformer` command: outside the package, whose import would make all who ask for help wait for torch."""

is_running = False  # stays so in processes that the command starts, which import this module too


def main() -> None:
    """Entry point of the command."""
    global is_running
    is_running = True
    from dcformer.cli import main as run

    run()
