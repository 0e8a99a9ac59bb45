"""Peak memory of one attention layer's forward pass: chunks of queries against every head's whole score matrix.

    python -m benchmarks.memory                                    # lengths up to 4096, 11 GB for whole matrices
    python -m benchmarks.memory --measure chunked --length 8192    # one figure, in bytes

Each figure comes from a process of its own, as the rise of peak resident memory (Linux) over what was in use before.
`dcformer bench attention` measures that of a GPU.
"""

import subprocess
import sys
from pathlib import Path

import torch

from dcformer import DCFormerConfig, DCFormerModel
from dcformer.bench import measure

from . import report


_IS_WHOLE = {"chunked": False, "whole": True}  # whether the layer is asked for its weights


@torch.no_grad()
def peak_bytes(name: str, length: int, heads: int, head_dim: int) -> int:
    """Bytes that a forward call of the layer needs at its peak, over those in use before it."""
    sizes = {"hidden_size": heads * head_dim, "intermediate_size": 1, "num_hidden_layers": 1}
    config = DCFormerConfig(vocab_size=1, num_attention_heads=heads, sliding_window=None, **sizes)
    model = DCFormerModel(config).eval()

    def attend(hidden_states: torch.Tensor) -> None:
        positions = model.rotary_emb(hidden_states, torch.arange(hidden_states.shape[1]).unsqueeze(0))
        model.layers[0].self_attn(hidden_states, positions, output_attentions=_IS_WHOLE[name])

    attend(torch.randn(1, 16, config.hidden_size))  # libraries load at their first call
    hidden_states = torch.randn(1, length, config.hidden_size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = _process_status("VmRSS")
    attend(hidden_states)
    return _process_status("VmHWM") - before


def _process_status(field: str) -> int:
    """One field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="longest; its half, quarter and eighth come too")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--measure", choices=sorted(_IS_WHOLE), help="print the bytes of this one at this length, only")
    args = parser.parse_args()
    if args.measure is not None:
        print(peak_bytes(args.measure, args.length, args.heads, args.head_dim))
        return
    peaks: dict[str, dict[int, int]] = {name: {} for name in _IS_WHOLE}
    command = [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:]]
    rows = []
    for length in (args.length // 8, args.length // 4, args.length // 2, args.length):
        cells = [str(length)]
        for name, found in peaks.items():
            own = [*command, "--measure", name, "--length", str(length)]
            found[length] = int(subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True).stdout)
            cells += [f"{found[length] / 2**20:.0f}", f"{found[length] / 2**10 / length:.0f}"]
        rows.append([*cells, f"{peaks['whole'][length] / peaks['chunked'][length]:.1f}"])
    measure.show_table(["length", "chunked MiB", "KiB / token", "whole MiB", "KiB / token", "ratio"], rows)
    report.write(args, figures=peaks)


if __name__ == "__main__":
    main()
