"""Tensor parallelism by heads: each process computes some groups of heads.

Heads compose only inside their group (section 3.2 of the paper), so groups can be on different devices. If
`compose_groups` is a multiple of the number of processes, a layer communicates as much as in Llama: one sum after the
attention and one after the MLP. Without composition every head counts as a group. If the groups do not divide, each
process computes its part of the linear layers, gathers the results, and composes all heads.

The attention needs a style of its own: those of Transformers shard a linear layer by consecutive rows, but `qkv_proj`
has first all queries, then all keys, then all values, and a process needs some of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from .configuration_dcformer import DCFormerConfig


if torch.distributed.is_available():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

# Of the parameters of `ComposeProjection`.
DIMENSION_OF_GROUPS = {"hidden_weight": 1, "low_rank_weight": 0, "gate_weight": 1, "static_weight": 1}


def shards_heads(config: DCFormerConfig, ranks: int) -> bool:
    """True if each of `ranks` processes can compute some of the heads: groups and key/value heads divide evenly."""
    groups = config.compose_groups if config.composes_heads else config.num_attention_heads
    return groups % ranks == 0 and config.num_key_value_heads % ranks == 0


class AttentionByHeads(TensorParallelLayer):
    """An attention layer: by heads if they divide, else by its linear layers, with Transformers' styles."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        distributed, ranks = module.config.distributed_config, mesh.size()
        if isinstance(distributed.tp_plan, dict):
            return module  # the caller's plan decides
        is_alone = (getattr(distributed, "dp_size", None) or distributed.fsdp_size or 1) == 1
        is_quantized = getattr(module.config, "quantization_config", None) is not None
        if is_quantized or not is_alone or not shards_heads(module.config, ranks):
            _install(module.qkv_proj, "colwise_gather_output", mesh)
            _install(module.o_proj, "rowwise_split_input", mesh)
            return module
        if module.num_heads == module.num_key_value_heads:
            # For three parts of equal size torch has a placement that shards each.
            for name, whole in list(module.qkv_proj.named_parameters()):
                _shard(module.qkv_proj, name, whole, mesh, _StridedShard(0, split_factor=3))
            _LocalParameters().install_forward(module.qkv_proj, mesh)
        else:
            _RowsOfHeads(module.qkv_sizes).install_forward(module.qkv_proj, mesh)
        for norm in (module.q_norm, module.k_norm):
            if norm is not None:
                _SharedByHeads().install_forward(norm, mesh)
        if module.compose is not None:
            for name, whole in list(module.compose.named_parameters()):
                _shard(module.compose, name, whole, mesh, Shard(DIMENSION_OF_GROUPS[name]))
            module.compose.groups //= ranks
            _LocalParameters().install_forward(module.compose, mesh)
        _install(module.o_proj, "rowwise", mesh)
        module.num_heads //= ranks
        module.num_key_value_heads //= ranks
        module.qkv_sizes = [size // ranks for size in module.qkv_sizes]
        return module


class _SharedByHeads(TensorParallelLayer):
    """Parameters that every process has in full, with the gradient of its heads only: gradients are summed."""

    def local_part(self, parameter: Tensor, mesh: Any) -> Tensor:
        return _with_summed_gradient(parameter, mesh)

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: Any) -> Iterator[None]:
        whole = dict(module._parameters)
        for name, parameter in whole.items():
            if parameter is not None:
                module._parameters[name] = self.local_part(parameter, mesh)  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(whole)


class _RowsOfHeads(_SharedByHeads):
    """
    The fused projection of grouped-query attention: every process has it in full, and computes the rows of its heads.
    `sizes` are the numbers of rows of queries, keys and values.
    """

    def __init__(self, sizes: list[int]):
        self.sizes = sizes

    def local_part(self, parameter: Tensor, mesh: Any) -> Tensor:
        parts = super().local_part(parameter, mesh).split(self.sizes)
        return torch.cat([part.chunk(mesh.size())[mesh.get_local_rank()] for part in parts])

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: Any) -> tuple:
        return (_with_summed_gradient(args[0], mesh), *args[1:]), kwargs


class _LocalParameters(TensorParallelLayer):
    """Computes with this process's part of the parameters on inputs that every process has in full."""

    transform_inputs_pre_forward = _RowsOfHeads.transform_inputs_pre_forward

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True


def _install(module: nn.Module, style_name: str, mesh: Any) -> None:
    """Apply one of Transformers' styles."""
    style = ALL_PARALLEL_STYLES[style_name]
    for name, _ in list(module.named_parameters()):
        style.shard_param(module, name, mesh)
    style.install_forward(module, mesh)


def _shard(module: nn.Module, name: str, whole: Tensor, mesh: Any, placement: Any) -> None:
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


class _SumOfGradients(torch.autograd.Function):
    """The identity; in the backward pass, the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def _with_summed_gradient(states: Tensor, mesh: Any) -> Tensor:
    needs_gradient = torch.is_grad_enabled() and states.requires_grad
    return _SumOfGradients.apply(states, mesh.get_group()) if needs_gradient else states
