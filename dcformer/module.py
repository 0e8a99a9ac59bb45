"""`DCMultiheadAttention`: composed attention with the calling convention and the parameters of nn.MultiheadAttention.

In cross-attention the query-wise weights are computed from the query's sequence and the key-wise ones from the key's
(equation 8 of the paper).
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from .compose_dcformer import ComposeProjection
from .dcmha import composed_attention
from .visibility_dcformer import Visibility


class DCMultiheadAttention(nn.MultiheadAttention):
    """
    Multi-head attention with composed heads, a drop-in replacement for `nn.MultiheadAttention` and a subclass of it.

    Arguments, masks, shapes and parameter names are torch's: the state of an `nn.MultiheadAttention` loads with
    `strict=False`, and lacks only `compose.*`. [`from_torch`] makes a copy that starts with the same outputs.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: As in torch, in its order.
            `dropout` applies to the composed weights.
        add_bias_kv, add_zero_attn (`bool`, default to `False`): Must be False: no hidden state belongs to the key that
            torch adds for them, so it has no key-wise compose weights.
        is_causal (`bool`, defaults to `False`): Hide later keys in every call. With fewer queries than keys, the last
            query is at the position of the last key.
        sliding_window (`int`, *optional*): Visible keys, the query's position included: t - w < s <= t if causal, else
            |t - s| < w.
        identity (`bool`, defaults to `False`): Start as plain attention, and learn the composition. False: start with
            the small composition of section 4 of the paper.
        rank, groups, activation, norm_eps, pre, post, query_wise, key_wise, low_rank, gate, static: The composition,
            see [`ComposeProjection`].

    Example:

    ```python
    >>> import torch
    >>> from dcformer import DCMultiheadAttention

    >>> attention = DCMultiheadAttention(embed_dim=64, num_heads=8, batch_first=True)
    >>> x = torch.randn(2, 10, 64)
    >>> output, _ = attention(x, x, x, need_weights=False)
    ```
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_causal: bool = False,
        sliding_window: int | None = None,
        identity: bool = False,
        **composition: Any,
    ):
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads != 0:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, both above 0, got {embed_dim} and {num_heads}."
            )
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                raise ValueError(f"{name} must be False, got {value}; the key that it adds has no compose weights.")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}.")
        names: Any = ComposeProjection.__init__.__kwdefaults__
        if unknown := composition.keys() - (names.keys() - {"key_size"}):
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        Visibility(1, 1, sliding_window=sliding_window)  # refuses a window that hides every key
        options: dict[str, Any] = {"kdim": kdim, "vdim": vdim, "device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=batch_first, **options)
        self.is_causal, self.sliding_window, self.identity = is_causal, sliding_window, identity
        self._qkv_same_embed_dim = False  # else torch's encoder layers run a kernel that leaves the composition out
        self.compose = ComposeProjection(
            embed_dim, num_heads, key_size=self.kdim, device=device, dtype=dtype, **composition
        )
        self.reset_parameters()

    def _reset_parameters(self) -> None:
        """Leave it to `reset_parameters`: torch's constructor calls this before there is a composition."""

    def reset_parameters(self) -> None:
        """Initialise the projections as torch does, and the composition as in section 4 of the paper."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        self.compose.reset_parameters(self.identity)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled module; torch's method would set to True what those of earlier versions lack."""
        super().__setstate__({"_qkv_same_embed_dim": False, **state})

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention, *, identity: bool = True, **options: Any) -> Self:
        """
        A copy of a torch module, with the same outputs until the composition is trained.

        Args:
            attention (`nn.MultiheadAttention`): Made without `add_bias_kv` and `add_zero_attn`.
            identity, options: Arguments of this class that torch's module does not have.
        """
        names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
        like = attention.out_proj.weight
        copy = cls(
            **{name: getattr(attention, name) for name in names},
            bias=attention.in_proj_bias is not None,
            add_bias_kv=attention.bias_k is not None,
            device=like.device,
            dtype=like.dtype,
            identity=identity,
            **options,
        )
        copy.load_state_dict({**copy.state_dict(), **attention.state_dict()})
        return copy.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend, with the arguments of `nn.MultiheadAttention.forward`.

        Args:
            query, key, value (`Tensor`): (length, batch, channels), or (batch, length, channels) with `batch_first`, or
                without a batch (length, channels).
            key_padding_mask, attn_mask (`Tensor`, *optional*): (batch, key length), and (query length, key length) or
                (batch x heads, query length, key length): True hides; floating point is added to the composed scores.
            need_weights (`bool`, defaults to `True`): Also return the composed weights, which takes memory quadratic in
                the length.
            average_attn_weights (`bool`, defaults to `True`): Average these weights over the heads.
            is_causal (`bool`, defaults to `False`): Hide later keys in this call if there is no `attn_mask`.

        Returns:
            The output, shaped as the query, and the composed weights or None: (batch, query length, key length), or
            with `average_attn_weights=False` (batch, heads, query length, key length), without the batch if there is
            none. Composed weights can be negative, and a row need not sum to one. For a query that sees no key they
            are zero (torch: nan).

        Raises:
            ValueError: for shapes or dtypes that do not fit.
        """
        batched = self._check_inputs(query, key, value)
        is_same = key is query
        if not batched:
            query, key, value = (states.unsqueeze(0) for states in (query, key, value))
        elif not self.batch_first:
            query, key, value = (states.transpose(0, 1) for states in (query, key, value))
        # (batch, length, channels) each
        mask = self._visibility(query.shape[:2], key.shape[1], batched, key_padding_mask, attn_mask, is_causal)
        pre, post = self.compose(query) if is_same else self.compose(query, key)
        separate: Any = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        projections = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(states, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for states, weight, bias in zip((query, key, value), projections, biases)
        )  # (batch, heads, length, head channels)
        options: dict[str, Any] = {"attention_mask": mask, "dropout": self.dropout if self.training else 0.0}
        result = composed_attention(q, k, v, pre, post, return_weights=need_weights, **options)
        attended, weights = result if need_weights else (result, None)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))  # (batch, query, embed_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """True if there is a batch; raise ValueError for sequences that do not fit together."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "Nested tensors are not supported; set use_nested_tensor of nn.TransformerEncoder to False."
            )
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        batch = slice(0, 0) if query.dim() == 2 else slice(0, 1) if self.batch_first else slice(1, 2)
        fits = query.dim() in (2, 3) and query.dim() == key.dim() and query.shape[batch] == key.shape[batch]
        widths = self.embed_dim, self.kdim, self.vdim
        fits = fits and widths == tuple(states.shape[-1] for states in (query, key, value))
        if not fits or key.shape[:-1] != value.shape[:-1]:
            order = "(batch, length, channels)" if self.batch_first else "(length, batch, channels)"
            raise ValueError(
                f"query, key and value must be {order} or (length, channels), of one batch, with {widths} channels, "
                f"got {shapes}."
            )
        return query.dim() == 3

    def _visibility(
        self, rows: torch.Size, keys: int, batched: bool, padding_mask: Any, attn_mask: Any, is_causal: bool
    ) -> Visibility:
        """The masks of a call, in which True hides, as a [`Visibility`]."""
        batch, queries = rows
        for name, mask in (("key_padding_mask", padding_mask), ("attn_mask", attn_mask)):
            dtype = getattr(mask, "dtype", torch.bool if mask is None else type(mask))
            if dtype != torch.bool and not getattr(dtype, "is_floating_point", False):
                raise ValueError(f"{name} must be boolean (True hides) or floating point, got {dtype}.")
        padding = dense = None
        if padding_mask is not None:
            shape = (batch, keys) if batched else (keys,)
            if padding_mask.shape != shape:
                raise ValueError(f"key_padding_mask must be {shape}, got {tuple(padding_mask.shape)}.")
            padding_mask = padding_mask.view(batch, keys)
            if padding_mask.dtype == torch.bool:
                padding = ~padding_mask
            else:
                dense = padding_mask[:, None, None].expand(batch, 1, queries, keys)
        if attn_mask is not None:
            shared, per_head = (queries, keys), (batch * self.num_heads, queries, keys)
            if attn_mask.shape not in (shared, per_head):
                raise ValueError(f"attn_mask must have shape {shared} or {per_head}, got {tuple(attn_mask.shape)}.")
            pairs = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.view(batch, -1, queries, keys)
            if pairs.dtype != torch.bool:  # (batch or 1, heads or 1, query, key)
                dense = pairs if dense is None else dense + pairs
            else:
                dense = ~pairs if dense is None else dense.masked_fill(pairs, -torch.inf)
        is_causal = self.is_causal or (is_causal and attn_mask is None)
        band: dict[str, Any] = {"is_causal": is_causal, "sliding_window": self.sliding_window}
        return Visibility(queries, keys, **band, padding=padding, dense=dense)


__all__ = ["DCMultiheadAttention"]
