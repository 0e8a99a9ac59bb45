"""Pretrained Transformers of other families as DCFormers of the same function, with a composition yet to be learned."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from ..compose_dcformer import make_compose
from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import COMPOSED_SHAPE, COMPOSITION
from ..model_card import known_origin
from .arrays import SourceArray, file_stamps, open_safetensors, open_weights
from .authors_torch import local_folder, our_name, read_config
from .convert import write_model
from .destination import Destination
from .mapping import axis_sizes, part_offset
from .plan import DTYPES, Origin, Part, Plan, complete, parameter_shapes
from .report import ConversionReport
from .verify import logit_difference, run_streamed, sample_tokens, streamed_logits


# Fields that another family's name does not say. All others have the same names, or are in `_RENAMED`.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "mistral": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "attention_bias": True},  # that of o_proj, which Qwen 2 lacks, is zero
    "qwen3": {"qk_norm": True},
    "smollm3": {"qk_norm": False},
    "gpt_neox": {"qk_norm": False, "mlp_bias": True},
}
_RENAMED = {
    "rms_norm_eps": ("norm_eps", "qk_norm_eps"),
    "layer_norm_eps": ("norm_eps",),
    "use_parallel_residual": ("parallel_residual",),
}
# What changes the function and has no counterpart, with the values that change nothing.
_INEXACT: dict[str, tuple] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "quantization_config"), (None,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), (None, 1)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "hidden_dropout"), (None, 0)),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
}
_NEOX_NAMES = {
    "gpt_neox.embed_in.": "model.embed_tokens.",
    "gpt_neox.final_layer_norm.": "model.norm.",
    "gpt_neox.": "model.",
    "embed_out.": "lm_head.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".dense_h_to_4h.": ".up_proj.",
    ".dense_4h_to_h.": ".down_proj.",
}
_TABLES = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.(masked_)?bias$")  # of old files
_QKV = re.compile(r"(model\.layers\.\d+\.self_attn\.)(?:([qkv])_proj|query_key_value)\.(weight|bias)")
_PARTS = {"q": "query", "k": "key", "v": "value"}


def upcycle(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    rank: int | None = None,
    groups: int | None = None,
    layers: Sequence[int] | None = None,
    composition: str | os.PathLike | None = None,
    seed: int = 0,
    dtype: str = "keep",
    tolerance: float = 1e-5,
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Write a Llama, Mistral, Qwen 2, Qwen 3, SmolLM 2 or 3, or GPT-NeoX model as a DCFormer (DCPythia) with the same
    function, whose composition is the identity until it is trained.

    Args:
        source: Folder of safetensors or torch files, name on the Hub, or `FOLDER_OR_NAME/FILE.gguf`. Its tokenizer and
            settings for `generate` come along.
        rank, groups (*optional*): `compose_rank` and `compose_groups` of the configuration; `None`: its defaults.
        layers (*optional*): Layers whose heads are composed, from 0; `None`: all.
        composition (*optional*): File of `save_composition`, whose parameters and settings are taken instead.
        seed (defaults to 0): Of the parameters that do not start at zero.
        tolerance (defaults to 1e-5): Largest difference from the source's logits in float32, as a share of the largest
            logit. The source's weights are rounded to `dtype` for it, and a composition from a file is switched off.
        destination, dtype, force, options: As of [`convert_maxtext`], without reference logits.

    Returns:
        [`ConversionReport`], also written as `conversion_report.json`.

    Raises:
        ValueError: for a model without an exact counterpart, naming the fields; if the logits differ; if the
            composition belongs to a model of another shape; and as of [`convert_maxtext`].

    Source: sections 3 and 4 of the paper; the idea of upcycling is not in it.
    """
    target = Destination(destination, source, force)
    opened = _open_gguf(source) if str(source).endswith(".gguf") else _open_folder(source)
    if options.get("tokenizer") is None:
        options["tokenizer"] = opened.tokenizer
    chosen = {"compose_rank": rank, "compose_groups": groups, "compose_layers": layers and sorted(layers)}
    settings = {name: value for name, value in chosen.items() if value is not None}
    trained: dict[str, SourceArray] = {}
    if composition is not None:
        if settings:
            raise ValueError(
                f"The composition {str(composition)!r} says how it is made; leave out {', '.join(settings)}."
            )
        trained, settings = _open_composition(Path(composition), opened.config)
    plan = _plan(opened, settings, trained, seed, dtype)
    if composition is not None:
        plan.stamps += file_stamps([Path(composition)])
    plan.check = lambda folder: _check(folder, opened, dtype, tolerance, composed=composition is None)
    licence, base_model = known_origin(str(source), target.path.name)
    plan.source |= {"licence": licence, "base_model": base_model}
    return write_model(plan, target, **options)


@dataclasses.dataclass
class _Opened:
    """A model of another family; `arrays` by the names of its files."""

    config: PreTrainedConfig
    arrays: dict[str, SourceArray]
    location: str
    stamps: list
    tokenizer: Any = None
    generation: Path | None = None

    def named(self, name: str) -> str:
        """Our name of one of its arrays, or of the parameters of its class; q, k and v stay apart."""
        return our_name(name, _NEOX_NAMES if self.config.model_type == "gpt_neox" else {})


def _open_folder(source: str | os.PathLike) -> _Opened:
    folder = local_folder(source)
    config = AutoConfig.from_pretrained(folder)
    _refuse_inexact(config, source)
    arrays = open_weights(folder)
    tokenizer = folder if any(folder.glob("tokenizer*")) else None
    generation = folder / "generation_config.json"
    stamps = file_stamps({Path(array.where) for array in arrays.values()})
    return _Opened(config, arrays, str(folder), stamps, tokenizer, generation if generation.is_file() else None)


def _open_gguf(source: str | os.PathLike) -> _Opened:
    folder, file = os.path.split(source)
    config = AutoConfig.from_pretrained(folder, gguf_file=file)
    _refuse_inexact(config, source)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    arrays = {
        name: SourceArray(name, str(source), tuple(values.shape), values.dtype, tuple(values.shape), values.__getitem__)
        for name, values in model.state_dict().items()
    }
    stamps = file_stamps([Path(source)]) if Path(source).exists() else []
    return _Opened(config, arrays, str(source), stamps, AutoTokenizer.from_pretrained(folder, gguf_file=file))


def _refuse_inexact(config: PreTrainedConfig, source: str | os.PathLike) -> None:
    """Raise ValueError with every field that no DCFormer of the same function has."""
    inner = config.get_text_config()
    values = {name: getattr(inner, name, neutral[0]) for name, neutral in _INEXACT.items()}
    reasons = [f"{name}={value!r}" for name, value in values.items() if value not in _INEXACT[name]]
    rotated = getattr(inner, "no_rope_layers", None) or []
    if not all(rotated):
        reasons.append(f"no_rope_layers={rotated!r}")
    if config.model_type not in _FAMILIES:
        reasons.insert(0, f"model_type={config.model_type!r}")
    if reasons:
        raise ValueError(
            f"No DCFormer computes exactly what {str(source)!r} does, because of {', '.join(reasons)}; upcycle a model "
            f"of one of the types {', '.join(_FAMILIES)} without such fields."
        )


def _config_values(source: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a DCFormer's configuration that another family's configuration gives, by name."""
    theirs = {field.name for field in dataclasses.fields(source)} | {"head_dim"}
    ours = DCFormerConfig.__annotations__.keys() & theirs
    values = {"sliding_window": None} | {name: getattr(source, name, None) for name in sorted(ours)}
    for name, renamed in _RENAMED.items():
        if name in theirs:
            values |= dict.fromkeys(renamed, getattr(source, name))
    if source.model_type == "mistral" and values["sliding_window"] is not None:
        values["layer_types"] = ["sliding_attention"] * values["num_hidden_layers"]
    return values | _FAMILIES[source.model_type]


def _plan(opened: _Opened, settings: dict, trained: dict[str, SourceArray], seed: int, dtype: str) -> Plan:
    """Every array of the source in its place, and for the composition those of a file, or drawn ones."""
    values = _config_values(opened.config)
    config = (DCPythiaConfig if opened.config.model_type == "gpt_neox" else DCFormerConfig)(**values, **settings)
    origins = [Origin(name, value, "source") for name, value in sorted(values.items())]
    origins += [Origin(name, value, "composition") for name, value in sorted(settings.items())]
    where = {"format": f"{opened.config.model_type} of Transformers", "location": opened.location, "step": None}
    plan = Plan(config, {}, where | {"seed": seed}, list(opened.stamps), origins=origins, generation=opened.generation)
    shapes = parameter_shapes(config)

    def take(parameter: str, array: SourceArray, *part: Any) -> None:
        plan.arrays[array.name] = array
        plan.parts[parameter].append(Part(array.name, *(part or (array.whole, tuple(range(len(array.shape)))))))

    for array in opened.arrays.values():
        name = opened.named(array.name)
        if _TABLES.search(name):
            plan.ignored[array.name] = "table computed from the configuration"
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            plan.ignored[array.name] = "the embedding, which the output layer shares"
        elif match := _QKV.fullmatch(name):
            layer, letter, kind = match.groups()
            _take_qkv(take, f"{layer}qkv_proj.{kind}", array, config, letter)
        else:
            if array.shape != shapes.get(name, array.shape):
                raise ValueError(f"{array.name} has shape {array.shape} but {shapes[name]} by {opened.location}.")
            take(name, array)
    stored = next(iter(plan.arrays.values())).dtype
    for name in [name for name in shapes if name not in plan.parts]:
        if name in trained:
            take(name, trained[name])
        elif COMPOSITION.search(name) and not trained:
            take(name, _made(name, shapes[name], stored, functools.partial(_drawn, config, name, seed)))
        elif name.endswith("o_proj.bias") and "attention_bias" in _FAMILIES[opened.config.model_type]:
            take(name, _made(name, shapes[name], stored, functools.partial(torch.zeros, shapes[name])))
    order = {name: position for position, name in enumerate(shapes)}
    plan.parts.update({name: plan.parts.pop(name) for name in sorted(plan.parts, key=lambda name: order.get(name, -1))})
    return complete(plan, dtype)


def _take_qkv(take: Callable, parameter: str, array: SourceArray, config: DCFormerConfig, letter: str | None) -> None:
    """The parts of a projection of queries, keys or values, or (GPT-NeoX) of all three, which alternate by head."""
    sizes = axis_sizes(config) | ({"embed": 1} if parameter.endswith("bias") else {})
    if letter is not None:
        name, axes = _PARTS[letter], tuple(range(len(array.shape)))
        take(parameter, array, array.whole, axes, part_offset(name, sizes), f"as its {name} part")
        return
    shape = (sizes["head"], 3, sizes["channel"], *array.shape[1:])
    by_head = dataclasses.replace(array, shape=shape, load=lambda slices: array.read().view(shape)[slices])
    for index, name in enumerate(_PARTS.values()):
        region = tuple((index, index + 1) if axis == 1 else (0, size) for axis, size in enumerate(shape))
        kept = tuple(axis for axis in range(len(shape)) if axis != 1)
        take(parameter, by_head, region, kept, part_offset(name, sizes), f"of every head, as its {name} part")


def _made(name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> SourceArray:
    """An array that is in no file."""
    return SourceArray(name, "made for the conversion", shape, dtype, shape, lambda slices: make().to(dtype)[slices])


def _drawn(config: DCFormerConfig, name: str, seed: int) -> Tensor:
    """A parameter of a composition that starts as identity, the same whenever it is read."""
    layer, kind = int(name.split(".")[2]), name.split(".")[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * config.num_hidden_layers + layer)
        compose: Any = make_compose(config)
        compose.reset_parameters(identity=True)
    return compose.get_parameter(kind).detach()


def _open_composition(path: Path, source: PreTrainedConfig) -> tuple[dict[str, SourceArray], dict[str, Any]]:
    """The parameters of a file of `save_composition`, and the fields of the configuration that they are made by."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if "composition" not in metadata:
        raise ValueError(f"{str(path)!r} holds no composition; give a file that save_composition wrote.")
    fields = json.loads(metadata["composition"])
    shape = {name: fields.pop(name) for name in COMPOSED_SHAPE}
    if differs := [name for name in shape if shape[name] != getattr(source, name)]:
        name = differs[0]
        raise ValueError(
            f"{str(path)!r} is the composition of a model with {name}={shape[name]} (made from "
            f"{metadata['source']!r}), but the source has {getattr(source, name)}; give the source that it is for."
        )
    return {array.name: array for array in open_safetensors(path)}, fields


def _check(folder: Path, opened: _Opened, dtype: str, tolerance: float, composed: bool) -> dict[str, str]:
    """Compare the logits of source and result, neither of which is ever in memory as a whole."""
    config, weights = read_config(folder / "config.json"), open_weights(folder)
    if not composed:
        config = type(config).from_dict({**config.to_dict(), "compose_pre": False, "compose_post": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(opened.config, dtype=torch.float32, attn_implementation="eager").eval()
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(opened.config)  # its tables are no parameters
    arrays = {opened.named(name): array for name, array in opened.arrays.items()}

    def read(name: str) -> Tensor:
        values = arrays[opened.named(name)].read()
        return values if dtype == "keep" else values.to(DTYPES[dtype])

    tokens = sample_tokens(config.vocab_size)
    expected = run_streamed(model, read, tokens)
    difference = logit_difference(expected, streamed_logits(config, lambda name: weights[name].read(), tokens))
    allowed = tolerance * expected.abs().max().item()
    if not difference.max_abs <= allowed:
        raise ValueError(
            f"The logits differ from those of {opened.location}: {difference}; allowed is {allowed:.3g}. The source "
            "does something that has no counterpart here, or give a larger tolerance."
        )
    return {"logits of the source" + ("" if composed else ", without composition"): str(difference)}
