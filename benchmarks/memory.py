"""Peak memory of one attention layer's forward pass: chunks of queries against every head's whole score matrix.

Each figure comes from a process of its own, as the rise of the peak above what the process held before the call:
resident memory on a CPU (Linux), allocated memory on a GPU. The layer attends to all earlier positions.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from dcformer import DCFormerConfig, DCFormerModel


try:
    from . import common
except ImportError:  # run as a file, not as a module of the package
    import common


# Whether the layer is asked for its weights, which are those of all queries and keys.
_FORMS = {"chunked": False, "whole": True}
_DIVISORS = (8, 4, 2, 1)
_WARM_UP_LENGTH = 16
_WANTED_RATIO = 8
_KIBIBYTE, _MEBIBYTE = 2**10, 2**20


def make_model(args: argparse.Namespace) -> DCFormerModel:
    """One layer, of which only the attention is called; the rest is as small as can be."""
    config = DCFormerConfig(
        vocab_size=1,
        hidden_size=args.heads * args.head_dim,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=args.heads,
        sliding_window=None,
    )
    torch.manual_seed(0)
    return DCFormerModel(config).eval().to(args.device, common.DTYPES[args.dtype])


@torch.no_grad()
def peak_bytes(form: str, length: int, args: argparse.Namespace) -> int:
    """Bytes that one forward call of the layer needs at its peak, over those in use before it."""
    model = make_model(args)
    generator = torch.Generator(args.device).manual_seed(1)

    def random_states(positions):
        shape = (1, positions, args.heads * args.head_dim)
        return torch.randn(shape, generator=generator, device=args.device, dtype=common.DTYPES[args.dtype])

    def attend(hidden_states):
        position_ids = torch.arange(hidden_states.shape[1], device=args.device).unsqueeze(0)
        positions = model.rotary_emb(hidden_states, position_ids)
        return model.layers[0].self_attn(hidden_states, positions, output_attentions=_FORMS[form])

    attend(random_states(_WARM_UP_LENGTH))  # libraries load and allocate at their first call
    hidden_states = random_states(length)  # (batch, length, hidden)
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(args.device)
        before = torch.cuda.memory_allocated(args.device)
        attend(hidden_states)
        return torch.cuda.max_memory_allocated(args.device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = _process_status("VmRSS")
    attend(hidden_states)
    return _process_status("VmHWM") - before


def _process_status(field: str) -> int:
    """One field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(field + ":"))
    return _KIBIBYTE * int(kibibytes)


def peak_bytes_in_fresh_process(form: str, length: int) -> int:
    """`peak_bytes` in a new process that got this one's arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", form, "--length", str(length)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def show_peaks(peaks: dict[str, dict[int, int]]) -> None:
    """Print both forms' peaks by length, whole and per token: the latter stays level where growth is linear."""
    rows = []
    for length, chunked in peaks["chunked"].items():
        whole = peaks["whole"][length]
        figures = (
            f"{value:.0f}" for peak in (chunked, whole) for value in (peak / _MEBIBYTE, peak / _KIBIBYTE / length)
        )
        rows.append([str(length), *figures, f"{whole / chunked:.1f}"])
    columns = ["length", "chunked MiB", "KiB / token", "whole MiB", "KiB / token", "ratio"]
    common.show_table(columns, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="longest; its half, quarter and eighth come too")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--measure", choices=sorted(_FORMS), help="print this form's bytes at this length, only")
    common.add_common_arguments(parser)
    args = parser.parse_args()
    if args.measure is None and args.length < _DIVISORS[0]:
        parser.error(f"--length must be at least {_DIVISORS[0]}, got {args.length}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.measure is not None:
        print(peak_bytes(args.measure, args.length, args))
        return
    common.show_environment(args.device)
    print(f"batch 1, hidden {args.heads * args.head_dim}, heads {args.heads}, head_dim {args.head_dim}, {args.dtype}")
    lengths = [args.length // divisor for divisor in _DIVISORS]
    peaks = {form: {length: peak_bytes_in_fresh_process(form, length) for length in lengths} for form in _FORMS}
    show_peaks(peaks)
    ratio = peaks["whole"][args.length] / peaks["chunked"][args.length]
    print(f"Length {args.length}: {ratio:.1f} times less memory in chunks; wanted: at least {_WANTED_RATIO}")
    common.write_json(args, {"peak bytes": peaks})


if __name__ == "__main__":
    main()
