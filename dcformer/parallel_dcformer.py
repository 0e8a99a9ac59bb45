"""Tensor parallelism by heads: every rank computes its own groups of heads and its own part of the MLP.

Section 3.2 of the paper lets heads compose inside groups only, so that groups can live on different devices. With
`compose_groups` a multiple of the number of ranks a layer then costs what it costs in Llama: one sum over the ranks
after the attention and one after the MLP. A model without composition is as if every head were a group. Where the
groups cannot be divided, each rank computes its part of the linear layers, gathers it, and composes all heads.

Transformers shards a linear layer by consecutive rows. The rows of `qkv_proj` are those of all queries, then of all
keys, then of all values, and a rank needs a piece of each; the classes below are the styles that do this, under names
that a plan can hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.masking_utils import create_masks_for_generate

from .configuration_dcformer import DCFormerConfig


if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel as _Base
else:
    _Base = object  # `ParallelModel` is mixed into the other

# Of the parameters of `DCFormerCompose`.
DIMENSION_OF_GROUPS = {"hidden_weight": 1, "low_rank_weight": 0, "gate_weight": 1, "static_weight": 1}
HEADS, GROUPS, MLP_SLICES = "dcformer_heads", "dcformer_compose_groups", "dcformer_mlp_slices"


def shards_heads(config: DCFormerConfig, ranks: int) -> bool:
    """Whether each of so many ranks can compute heads of its own: groups and key/value heads divide evenly."""
    groups = config.compose_groups if config.composes_heads else config.num_attention_heads
    return groups % ranks == 0 and config.num_key_value_heads % ranks == 0


def tensor_parallel_plan(config: DCFormerConfig, ranks: int) -> dict[str, str]:
    """
    How the layers are divided among the ranks of a tensor parallel model.

    Args:
        config (`DCFormerConfig`): The model.
        ranks (`int`): `tp_size`, the number of processes that share it.

    Returns:
        `dict[str, str]`: Transformers' name of a style by the module's name in the base model. By heads if
        `compose_groups` (without composition the number of heads) and `num_key_value_heads` are multiples of `ranks`;
        otherwise the attention's linear layers alone are divided, and their outputs gathered.

    Source: section 3.2 of the paper for the groups.
    """
    plan = dict(config.base_model_tp_plan or {})
    if shards_heads(config, ranks):
        plan.pop("layers.*.self_attn.qkv_proj", None)
        plan.update({"layers.*.self_attn": HEADS, "layers.*.self_attn.o_proj": "rowwise"})
        if config.composes_heads:
            plan["layers.*.self_attn.compose"] = GROUPS
    slices = config.mlp_gate_dim
    if config.intermediate_size % ranks == 0 and (slices is None or slices % ranks == 0):
        for name in ("gate_proj", "up_proj"):
            if f"layers.*.mlp.{name}" in plan:
                plan[f"layers.*.mlp.{name}"] = "colwise"
        plan["layers.*.mlp.down_proj"] = "rowwise"
        if slices is not None:
            plan["layers.*.mlp"] = MLP_SLICES
    return plan


class _SumOfGradients(torch.autograd.Function):
    """The input as it is; its gradient is the sum of what the ranks computed, each from its part of the model."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def _with_summed_gradient(states: Tensor, group: Any) -> Tensor:
    if not torch.is_grad_enabled() or not states.requires_grad:
        return states
    return _SumOfGradients.apply(states, group)


class RankShare:
    """
    One rank's share of something that all ranks could compute.

    Args:
        mesh: The mesh of the ranks, of one dimension.
    """

    def __init__(self, mesh: Any):
        self.rank: int = mesh.get_local_rank()
        self.ranks: int = mesh.size()
        self.group = mesh.get_group()

    def part(self, states: Tensor) -> Tensor:
        """This rank's channels of (..., channels), which every rank has computed; the gradient is that of all ranks."""
        return _with_summed_gradient(states, self.group).chunk(self.ranks, dim=-1)[self.rank]


class _LocalParameters(TensorParallelLayer):
    """Computes with this rank's part of a module's parameters, on inputs that every rank holds whole."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: Any) -> tuple:
        return (_with_summed_gradient(args[0], mesh.get_group()), *args[1:]), kwargs


class _ComposeGroups(_LocalParameters):
    """`DCFormerCompose` of this rank's groups."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        if (whole := module._parameters.get(param)) is not None:
            _place(module, param, whole, mesh, Shard(DIMENSION_OF_GROUPS[param]))

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        module.groups //= mesh.size()
        return super().install_forward(module, mesh)


class _SharedByHeads(TensorParallelLayer):
    """A norm that every head uses: its parameters are whole on every rank, which sees only what its heads say."""

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: Any) -> Iterator[None]:
        originals = dict(module._parameters)
        for name, parameter in originals.items():
            if parameter is not None:
                module._parameters[name] = _with_summed_gradient(parameter, mesh.get_group())  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(originals)


class _Heads(TensorParallelLayer):
    """An attention layer that has this rank's heads: its rows of the queries, of the keys and of the values."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        # Where all three parts are equally many rows, a placement of torch says which of them a rank holds, and each
        # rank reads no more than these. With grouped queries there is none: see `_divide_grouped_queries`.
        if len(set(module.qkv_sizes)) == 1:
            for name, whole in list(module.qkv_proj.named_parameters()):
                _place(module.qkv_proj, name, whole, mesh, _StridedShard(0, split_factor=3))
        else:
            module.grouped_queries = _GroupedQueries(list(module.qkv_sizes), mesh)
        module.num_heads //= mesh.size()
        module.num_key_value_heads //= mesh.size()
        module.qkv_sizes = [size // mesh.size() for size in module.qkv_sizes]
        _LocalParameters().install_forward(module.qkv_proj, mesh)
        for norm in (module.q_norm, module.k_norm):
            if norm is not None:
                _SharedByHeads().install_forward(norm, mesh)
        return module


class _GroupedQueries:
    """Which rows of a fused projection with fewer keys and values than queries each rank holds."""

    def __init__(self, sizes: list[int], mesh: Any):
        self.sizes = sizes
        self.mesh = mesh

    def own_rows(self, whole: Tensor, rank: int) -> Tensor:
        return torch.cat([part.chunk(self.mesh.size())[rank] for part in whole.split(self.sizes)])

    def in_order(self, gathered: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other, in the order that files have."""
        rows = torch.arange(len(gathered))
        order = torch.cat([self.own_rows(rows, rank) for rank in range(self.mesh.size())])
        return torch.empty_like(gathered).index_copy_(0, order.to(gathered.device), gathered)


class _MLPSlices(TensorParallelLayer):
    """An MLP with slices that a softmax scales: the softmax is over all of them, the products are of this rank's."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        module.share = RankShare(mesh)
        return module


def _place(module: nn.Module, name: str, whole: Tensor, mesh: Any, placement: Any) -> None:
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


class ParallelModel(_Base):
    """What a DCFormer model adds to Transformers' own handling of models that several processes share."""

    _layers_of_stage: list[int] | None = None

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh: Any) -> Any:
        """As Transformers, by `tensor_parallel_plan` unless the caller gives a plan of modules."""
        stages = getattr(distributed_config, "pp_size", None) or 1
        if stages > 1:
            _check_stages(model.config, stages)
        ranks = getattr(distributed_config, "tp_size", None) or 1
        if mesh is not None and ranks > 1 and not isinstance(distributed_config.tp_plan, dict):
            model.tp_plan = _whole_plan(model, distributed_config, ranks)
        model = super().maybe_distribute_model(model, distributed_config, mesh)
        if stages > 1:  # whose other layers Transformers has put something else for
            layers = enumerate(model.base_model.layers)
            model.base_model._layers_of_stage = [number for number, layer in layers if hasattr(layer, "self_attn")]
        return model

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        for attention in _with_grouped_queries(model).values():
            _divide_grouped_queries(attention)
        return loaded

    def gather_sharded_state_dict_for_save(self, model_to_save: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """As Transformers, and the rows of every projection in the order that files have."""
        state: dict[str, Tensor] = super().gather_sharded_state_dict_for_save(model_to_save, *args, **kwargs)
        for name, attention in _with_grouped_queries(model_to_save).items():
            for key in (f"{name}.qkv_proj.weight", f"{name}.qkv_proj.bias"):
                if key in state:
                    state[key] = attention.grouped_queries.in_order(state[key])
        return state

    def save_distributed_checkpoint(self, model_to_save: Any, *args: Any, **kwargs: Any) -> None:
        """
        As Transformers.

        Raises:
            ValueError: if heads are divided among ranks and there are fewer key/value heads than query heads.
        """
        if _with_grouped_queries(model_to_save):
            raise ValueError(
                "distributed_checkpoint=True cannot write a tensor parallel model with grouped queries "
                f"(num_key_value_heads={model_to_save.config.num_key_value_heads}), whose rows each rank orders by "
                "itself; leave distributed_checkpoint out, and save_pretrained gathers them."
            )
        super().save_distributed_checkpoint(model_to_save, *args, **kwargs)

    def _get_static_cache_init_shape(self) -> Any:
        # Transformers takes the heads of a rank from the names in the plan, and does not know those of this file.
        shape = super()._get_static_cache_init_shape()
        return shape if shape is None else (key_value_heads(self), shape[1])

    def create_masks_for_generate(self, **kwargs: Any) -> Any:
        """As Transformers; a stage of a pipeline makes the masks of its own layers when it computes them."""
        is_whole = len(layers_here(self)) == self.config.num_hidden_layers
        return create_masks_for_generate(**kwargs) if is_whole else kwargs["attention_mask"]


def layers_here(model: Any) -> Sequence[int]:
    """Numbers of the layers that this process computes: all, but for a stage of a pipeline."""
    number, of_stage = model.config.num_hidden_layers, model.base_model._layers_of_stage
    return range(number) if of_stage is None else [layer for layer in of_stage if layer < number]


def key_value_heads(model: Any) -> int:
    """Key/value heads in this process: with heads divided among ranks, those of its own rank."""
    return model.base_model.layers[layers_here(model)[0]].self_attn.num_key_value_heads


def _check_stages(config: DCFormerConfig, stages: int) -> None:
    if stages > config.num_hidden_layers:
        raise ValueError(f"pp_size must be at most num_hidden_layers ({config.num_hidden_layers}), got {stages}.")
    if config.position_embedding_type == "learned":
        raise ValueError(
            f"pp_size={stages} cannot be had with position_embedding_type='learned', since every stage of a pipeline "
            "would add the positions anew; use tp_size or fsdp_size."
        )


def _whole_plan(model: Any, distributed_config: Any, ranks: int) -> dict[str, str]:
    """The plan of the layers, and what Transformers plans for the embedding and the output layer."""
    plan = dict(model.tp_plan)
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    is_alone = (getattr(distributed_config, "dp_size", None) or distributed_config.fsdp_size or 1) == 1
    if is_alone and getattr(model.config, "quantization_config", None) is None:
        plan = {name: style for name, style in plan.items() if not name.startswith(f"{prefix}layers.")}
        plan.update({prefix + name: style for name, style in tensor_parallel_plan(model.config, ranks).items()})
    # Transformers 5.17 divides into equal parts only; 50,257 rows then stay whole on every rank.
    style = ALL_PARALLEL_STYLES["colwise_gather_output"]
    takes_any_size = type(style).validate_param is TensorParallelLayer.validate_param
    if model.config.vocab_size % ranks != 0 and not takes_any_size:
        for name in ("lm_head", f"{prefix}embed_tokens"):
            plan.pop(name, None)
    return plan


def _with_grouped_queries(model: Any) -> dict[str, Any]:
    """Attention layers whose rows torch has no placement for, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "grouped_queries", None)}


@torch.no_grad()
def _divide_grouped_queries(attention: Any) -> None:
    """Leave this rank's rows of a projection that every rank has loaded whole."""
    grouped, projection = attention.grouped_queries, attention.qkv_proj
    for name, whole in list(projection.named_parameters()):
        if isinstance(whole, DTensor):
            continue
        own = grouped.own_rows(whole, grouped.mesh.get_local_rank())
        rows = DTensor.from_local(own, grouped.mesh, [Shard(0)], run_check=False)
        projection._parameters[name] = nn.Parameter(rows, requires_grad=whole.requires_grad)


ALL_PARALLEL_STYLES.register(HEADS, _Heads())
ALL_PARALLEL_STYLES.register(GROUPS, _ComposeGroups())
ALL_PARALLEL_STYLES.register(MLP_SLICES, _MLPSlices())
