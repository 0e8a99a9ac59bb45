"""Pretrained Transformers of other families as DCFormers that compute the same, with a composition to be trained."""

import dataclasses
import functools
import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..common.hub import naming_what_is_missing
from ..compose_dcformer import make_compose
from ..configuration_dcformer import MAX_LAYERS, DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import COMPOSED_SHAPE, COMPOSITION
from ..loading import refuse_without_model
from ..model_card import known_origin
from .arrays import Source, SourceArray, file_stamps, open_safetensors, open_weights
from .authors_torch import PARTS, local_folder, our_name, qkv_part, refuse_revision
from .beside import find_files
from .conversion_report import ConversionReport
from .destination import Destination
from .gguf import generation_settings, open_gguf
from .mapping import axis_sizes
from .plan import DTYPES, Checkpoint, Layout, Origin, Part, group_parts, make_plan, parameter_shapes
from .settings import naming, read_json
from .verify import folder_logits, logit_difference, run_streamed, spread_tokens
from .writer import write_model


# What a family has besides the fields of its configuration, most of which have our names.
_FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "mistral", "smollm3")},
    "qwen2": {"attention_bias": True},  # that of o_proj, which Qwen 2 lacks, is zero
    "qwen3": {"qk_norm": True},
    "gpt_neox": {"mlp_bias": True},
}
_RENAMED = {"rms_norm_eps": "norm_eps", "layer_norm_eps": "norm_eps", "use_parallel_residual": "parallel_residual"}
# Fields that change the function and have no counterpart, with the values besides None that change nothing.
_NEUTRAL: dict[str, int | None] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv")),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "hidden_dropout"), 0),
    **dict.fromkeys(("attention_multiplier", "quantization_config")),
}
_NEOX_NAMES = {
    r"^gpt_neox\.": "",
    r"^embed_in\.": "embed_tokens.",
    r"^final_layer_norm\.": "norm.",
    r"^embed_out\.": "lm_head.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.": ".self_attn.",
    r"\.dense_h_to_4h\.": ".up_proj.",
    r"\.dense_4h_to_h\.": ".down_proj.",
}
_TABLES = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.(masked_)?bias$")  # of old files
_QKV = re.compile(r"(model\.layers\.\d+)\.self_attn\.(?:([qkv])_proj|query_key_value)\.(weight|bias)")


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
    tokenizer: Any = None,
    tolerance: float = 1e-5,
    revision: str | None = None,
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Write a Llama, Mistral, Qwen 2, Qwen 3, SmolLM 2 or 3, or GPT-NeoX model as a DCFormer (DCPythia) that
    computes the same logits: its composition is the identity until it is trained.

    Args:
        source: Folder of safetensors or torch files, name on the Hub, or `FOLDER_OR_NAME/FILE.gguf`. Its tokenizer and
            settings for `generate` come along.
        rank, groups (*optional*): `compose_rank` and `compose_groups` of the configuration; `None`: its defaults.
        layers (*optional*): Layers with composed heads, from 0; `None`: all.
        composition (*optional*): File of `save_composition` with a trained composition and its settings to use instead.
        seed (defaults to 0): Of the parameters that do not start at zero.
        tolerance (defaults to 1e-5): Largest difference from the source's logits in float32, as a share of the largest
            logit. The source's weights are rounded to `dtype` for it, and a composition from a file is switched off.
        revision (*optional*): Branch, tag or commit on the Hub; `None`: `main`.
        destination, dtype, tokenizer, force, options: As of [`convert_maxtext`], and so is what is returned.

    Raises:
        FileNotFoundError: for a folder without a model, or without the .gguf file.
        ValueError: for a model without an exact counterpart, naming the fields; if the logits differ; if the
            composition belongs to a model of another shape; and as of [`convert_maxtext`].

    Source: sections 3 and 4 of the paper; upcycling is not in it.
    """
    target = Destination(destination, source, force)
    folder, file = os.path.split(source) if str(source).endswith(".gguf") else (local_folder(source, revision), "")
    refuse_without_model(folder := str(folder or "."), file or "config.json")
    refuse_revision(source, revision)
    depth = None if file else read_json(Path(folder, "config.json")).get("num_hidden_layers")
    if isinstance(depth, int) and depth > MAX_LAYERS:  # of which Transformers would make lists
        raise ValueError(f"num_hidden_layers of {str(source)!r} must be at most {MAX_LAYERS}, got {depth}.")
    gguf: dict[str, Any] = {"gguf_file": file, "revision": revision} if file else {}
    with naming(source, ValueError, LookupError, struct.error), naming_what_is_missing(folder, revision):
        theirs = AutoConfig.from_pretrained(folder, **gguf)
    _refuse_inexact(theirs, source)
    model, stated = open_gguf(folder, gguf, theirs) if file else (None, {})
    read = {} if model is None else model.state_dict()
    arrays = {name: _array(name, str(source), w.shape, w.dtype, w.detach) for name, w in read.items()}
    arrays = arrays or open_weights(folder)
    if tokenizer is None and file:
        tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
        if (end := stated.get("tokenizer.ggml.eos_token_id")) is not None:  # Transformers 5.17 takes the begin of text
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)

    chosen = {"compose_rank": rank, "compose_groups": groups, "compose_layers": layers and sorted(layers)}
    settings = {name: value for name, value in chosen.items() if value is not None}
    trained: dict[str, SourceArray] = {}
    if composition is not None:
        if settings:
            raise ValueError(f"The composition {str(composition)!r} comes with its settings; leave out {[*settings]}.")
        trained, settings = _open_composition(Path(composition), theirs)
    facts: dict[str, Any] = {"seed": seed}
    for origin in (folder,) if file else (folder, str(source)):
        facts |= known_origin(origin, target.path.name)
    if "general.license" in stated:
        facts["licence"] = stated["general.license"]
    paths = {Path(array.where) for array in (*arrays.values(), *trained.values())}
    stamps = file_stamps(path for path in paths if path.exists())
    found = Source(f"{theirs.model_type} of Transformers", str(source), arrays, stamps, facts=facts)
    checkpoint = _read_model(found, theirs, settings, trained, seed)
    generation = json.dumps(sampling, indent=2).encode() if (sampling := generation_settings(stated)) else None
    files = find_files(Path(folder), checkpoint.config, tokenizer, generation=generation)

    def load() -> PreTrainedModel:
        """The source as Transformers loads it, in a dtype that holds all weights: mostly that of the mapped file."""
        exact = functools.reduce(torch.promote_types, {array.dtype for array in arrays.values()})
        return model or AutoModelForCausalLM.from_pretrained(folder, dtype=exact, attn_implementation="eager")

    check = functools.partial(_check, load=load, dtype=dtype, tolerance=tolerance, composed=composition is None)
    return write_model(make_plan(checkpoint, dtype, files), target, check=check, **options)


def _array(name: str, where: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> SourceArray:
    return SourceArray(name, where, tuple(shape), dtype, tuple(shape), lambda slices: make().to(dtype)[slices])


def _refuse_inexact(config: PreTrainedConfig, source: str | os.PathLike) -> None:
    """Raise ValueError with every field that no DCFormer of the same function has."""
    inner = config.get_text_config()
    values = {name: getattr(inner, name, None) for name in _NEUTRAL}
    reasons = [f"{name}={value!r}" for name, value in values.items() if value not in (None, _NEUTRAL[name])]
    if not all(rotated := getattr(inner, "no_rope_layers", None) or []):
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
    named = dict.fromkeys(DCFormerConfig.__annotations__.keys() & theirs) | _RENAMED
    values = {named[name] or name: getattr(source, name, None) for name in sorted(named.keys() & theirs)}
    values = {"qk_norm": False, "qk_norm_eps": values["norm_eps"], "sliding_window": None} | values
    if source.model_type == "mistral" and values["sliding_window"] is not None:
        values["layer_types"] = ["sliding_attention"] * values["num_hidden_layers"]
    return values | _FAMILIES[source.model_type]


def _is_tied(arrays: Mapping[str, SourceArray]) -> bool:
    """True if the output layer can be the embedding: Transformers does not tie an output layer that differs."""
    renamed = {our_name(name, _NEOX_NAMES): array for name, array in arrays.items()}
    both = [renamed[name] for name in ("lm_head.weight", "model.embed_tokens.weight") if name in renamed]
    return len(both) < 2 or torch.equal(*(array.read().float() for array in both))


def _read_model(
    source: Source, theirs: PreTrainedConfig, settings: dict[str, Any], trained: dict[str, SourceArray], seed: int
) -> Checkpoint:
    """
    The source as a DCFormer: its arrays, and those of a composition, from a file or at random.

    Args:
        theirs: The source's configuration.
        settings, trained: Fields of the composition, and its parameters by name; empty: they start as identity.
        seed: Of those that do not start at zero.
    """
    values = _config_values(theirs)
    values["tie_word_embeddings"] = values["tie_word_embeddings"] and _is_tied(source.arrays)
    config = (DCPythiaConfig if theirs.model_type == "gpt_neox" else DCFormerConfig)(**values, **settings)
    origins = [Origin(name, value, "source") for name, value in sorted(values.items())]
    origins += [Origin(name, value, "composition") for name, value in sorted(settings.items())]
    arrays: dict[str, SourceArray] = {}
    ignored: dict[str, str] = {}
    parts: list[tuple[str, Part]] = []
    for name, array in source.arrays.items():
        ours = our_name(name, _NEOX_NAMES)
        arrays[name] = array
        if _TABLES.search(ours):
            ignored[name] = "table computed from the configuration"
        elif ours == "lm_head.weight" and config.tie_word_embeddings:
            ignored[name] = "the embedding, which the output layer shares"
        elif not (match := _QKV.fullmatch(ours)):
            parts.append((ours, Part.all_of(array)))
        elif match[2] is not None:
            parts.append((f"{match[1]}.self_attn.qkv_proj.{match[3]}", qkv_part(config, array, match[2], match[3])))
        else:
            arrays[name], thirds = _by_head(config, array, match[3])
            parts += [(f"{match[1]}.self_attn.qkv_proj.{match[3]}", part) for part in thirds]
    dtype = next(array.dtype for name, array in arrays.items() if name not in ignored)
    for name, shape in parameter_shapes(config).items():
        if name in trained:
            arrays[name] = trained[name]
        elif COMPOSITION.search(name) and not trained:
            arrays[name] = _array(name, "random", shape, dtype, functools.partial(_initial, config, name, seed))
        elif name.endswith(".o_proj.bias") and theirs.model_type == "qwen2":
            arrays[name] = _array(name, "zero", shape, dtype, functools.partial(torch.zeros, shape))
        else:
            continue
        parts.append((name, Part.all_of(arrays[name])))
    return Checkpoint(replace(source, arrays=arrays), config, origins, Layout(group_parts(parts), ignored))


def _by_head(config: DCFormerConfig, array: SourceArray, kind: str) -> tuple[SourceArray, list[Part]]:
    """GPT-NeoX's projection to queries, keys and values, which alternate by head, and the three parts that it fills."""
    sizes = axis_sizes(config)
    shape = (sizes["head"], 3, sizes["channel"], *array.shape[1:])
    by_head = replace(array, shape=shape, load=lambda slices: array.read().view(shape)[slices])
    parts = []
    for index, letter in enumerate(PARTS):
        region = tuple((index, index + 1) if axis == 1 else (0, size) for axis, size in enumerate(shape))
        offset = qkv_part(config, array, letter, kind).offset
        parts.append(Part(array.name, region, (0, *range(2, len(shape))), offset, f"as its {PARTS[letter]} part"))
    return by_head, parts


def _initial(config: DCFormerConfig, name: str, seed: int) -> Tensor:
    """A parameter of a composition that starts as identity, the same whenever it is read."""
    _, _, layer, *_, kind = name.split(".")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * config.num_hidden_layers + int(layer))
        compose: Any = make_compose(config)
        compose.reset_parameters(identity=True)
    return compose.get_parameter(kind).detach()


def _open_composition(path: Path, source: PreTrainedConfig) -> tuple[dict[str, SourceArray], dict[str, Any]]:
    """The parameters of a file of `save_composition`, and the fields of the configuration that they are made by."""
    with naming(path, SafetensorError), safe_open(path, framework="pt") as file:
        fields = json.loads((file.metadata() or {}).get("composition", "{}"))
    for name in COMPOSED_SHAPE:
        if (size := fields.pop(name, None)) != (needed := getattr(source, name)):
            raise ValueError(f"{str(path)!r} must be the composition of a model with {name}={needed}, got {size}.")
    return open_safetensors(path), fields


def _check(
    folder: Path, load: Callable[[], PreTrainedModel], dtype: str, tolerance: float, composed: bool
) -> dict[str, str]:
    """Compare the logits of source and result. Of either, one weight at a time is in memory in float32."""
    source = load()
    parameters = dict(source.named_parameters(remove_duplicate=False))

    def read(name: str) -> Tensor:
        return parameters[name] if dtype == "keep" else parameters[name].to(DTYPES[dtype])

    tokens = spread_tokens(source.config.vocab_size, 32)
    expected = run_streamed(source, read, tokens)
    changes = {} if composed else {"compose_pre": False, "compose_post": False}
    difference = logit_difference(expected, folder_logits(folder, tokens, **changes))
    if not difference.max_abs <= (allowed := tolerance * expected.abs().max().item()):
        raise ValueError(
            f"The logits differ from those of the source: {difference}; allowed is {allowed:.3g}. The source does "
            "something that has no counterpart here, or give a larger tolerance."
        )
    return {"logits of the source" + ("" if composed else ", without composition"): str(difference)}
