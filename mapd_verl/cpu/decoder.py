"""A Qwen3 forward pass over packed tokens and a slot cache, for small models on one CPU thread.

With a model of a few million parameters the arithmetic of one token takes microseconds and the
dispatch of each torch operator about as long, so this forward fuses what can be fused when the
weights are loaded (q|k|v, gate|up, rotary pairs) and spends about 14 operators per layer.

Shape letters: N packed tokens, B sequences in decode, S slots, L slot capacity, C hidden size,
Hq query heads, Hk key/value heads, G = Hq / Hk, D head size, V vocabulary.

It knows only token ids, slots and positions: which request owns a slot is ``kv_cache.py``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import Qwen3Config

# (q [N, Hq, D], keys [S, L, Hk, D], values [S, L, Hk, D]) -> [N, Hq, D]
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_LAYER = "model.layers.{}."
_LAYER_PARTS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def check_supported(config: Qwen3Config) -> None:
    """Raise ``ValueError`` naming the first setting of ``config`` that this forward does not compute."""
    rope_type = config.rope_parameters["rope_type"]
    problems = {
        f"model_type={config.model_type!r} (only qwen3)": config.model_type != "qwen3",
        "attention_bias=True": bool(config.attention_bias),
        f"hidden_act={config.hidden_act!r} (only silu)": config.hidden_act != "silu",
        "sliding-window layers": any(kind != "full_attention" for kind in config.layer_types),
        f"rope_type={rope_type!r} (only default)": rope_type != "default",
    }
    for name, wrong in problems.items():
        if wrong:
            raise ValueError(f"the batched CPU generator does not support {name}")


def weight_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of ``config`` must hold, by its transformers name."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer_shapes: tuple[tuple[int, ...], ...] = (
        *((hidden,), (hidden,)),
        *((query, hidden), (key, hidden), (key, hidden), (hidden, query)),
        *((head,), (head,)),
        *((inner, hidden), (inner, hidden), (hidden, inner)),
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        for part, shape in zip(_LAYER_PARTS, layer_shapes, strict=True):
            shapes[_LAYER.format(index) + part] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _interleave(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Reorder head rows from (all real, all imaginary) to pairs; dot products of q and k stay the same."""
    return weight.view(-1, 2, head_size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor  # [C]
    qkv: torch.Tensor  # [C, (Hq + 2 Hk) D]
    qk_norm: torch.Tensor  # [Hq + Hk, D]
    out: torch.Tensor  # [Hq D, C]
    mlp_norm: torch.Tensor  # [C]
    gate_up: torch.Tensor  # [C, 2 I]
    down: torch.Tensor  # [I, C]


@dataclass(frozen=True)
class Weights:
    """The model's weights, fused for ``Decoder``; immutable, so a running step never sees half an update."""

    embedding: torch.Tensor  # [V, C]
    layers: tuple[_Layer, ...]
    norm: torch.Tensor  # [C]
    head: torch.Tensor  # [C, V]

    @classmethod
    def fuse(cls, state: Mapping[str, torch.Tensor], config: Qwen3Config) -> Weights:
        """Copy a full set of named tensors (any float dtype, any device) into fp32 fused form.

        Raises ``ValueError`` naming the tensor that is missing, unknown, or of the wrong shape. With tied
        embeddings an ``lm_head.weight`` in ``state`` is accepted and ignored, as transformers does.
        """
        wanted = weight_shapes(config)
        unknown = set(state) - set(wanted) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
        if unknown:
            raise ValueError(f"unknown weight {sorted(unknown)[0]!r} ({len(unknown)} in all)")
        for name, shape in wanted.items():
            if name not in state:
                raise ValueError(f"missing weight {name!r}")
            if tuple(state[name].shape) != shape:
                raise ValueError(f"weight {name!r} has shape {tuple(state[name].shape)}, the model needs {shape}")

        def get(name: str) -> torch.Tensor:
            return state[name].detach().to(device="cpu", dtype=torch.float32, copy=True)

        head_size = config.head_dim
        layers = []
        for index in range(config.num_hidden_layers):
            part = {name: get(_LAYER.format(index) + name) for name in _LAYER_PARTS}
            q, k = (_interleave(part[f"self_attn.{x}_proj.weight"], head_size) for x in "qk")
            q_norm, k_norm = (_interleave(part[f"self_attn.{x}_norm.weight"], head_size) for x in "qk")
            norms = [q_norm] * config.num_attention_heads + [k_norm] * config.num_key_value_heads
            layers.append(
                _Layer(
                    attention_norm=part["input_layernorm.weight"],
                    qkv=torch.cat([q, k, part["self_attn.v_proj.weight"]]).t().contiguous(),
                    qk_norm=torch.stack(norms),
                    out=part["self_attn.o_proj.weight"].t().contiguous(),
                    mlp_norm=part["post_attention_layernorm.weight"],
                    gate_up=torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]).t().contiguous(),
                    down=part["mlp.down_proj.weight"].t().contiguous(),
                )
            )
        embedding = get("model.embed_tokens.weight")
        head = embedding if config.tie_word_embeddings else get("lm_head.weight")
        return cls(embedding, tuple(layers), get("model.norm.weight"), head.t().contiguous())


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence: they take positions ``start, start + 1, ...`` of ``slot``."""

    slot: int
    start: int
    tokens: Sequence[int]


class Decoder:
    """Qwen3 over a preallocated cache ``[layer, k|v, S, L, Hk, D]`` in fp32.

    Raises ``ValueError`` if the configuration is one that it does not compute (see ``check_supported``).
    """

    def __init__(self, config: Qwen3Config, slots: int, capacity: int):
        check_supported(config)
        self.config, self.slots, self.capacity = config, slots, capacity
        self.q_heads, self.kv_heads, self.head_size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        # numpy's zeros are mapped lazily: a slot costs memory only when it is used. They must be zeros, since
        # a masked NaN would still poison the attention sum.
        shape = (config.num_hidden_layers, 2, slots, capacity, self.kv_heads, self.head_size)
        self.cache = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        position = torch.arange(capacity, dtype=torch.float32)
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        angle = position[:, None] / (config.rope_parameters["rope_theta"] ** exponent)[None, :]
        self.rotation = torch.polar(torch.ones_like(angle), angle)  # [L, D/2], complex
        self._range = torch.arange(capacity)

    def prefill(self, weights: Weights, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run the chunks' tokens, packed without padding; returns the logits of each one's last token, ``[n, V]``.

        Each token sees its own slot up to and including itself. Cache rows before ``start`` must be there.
        """
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        position = torch.cat([self._range[c.start : c.start + len(c.tokens)] for c in chunks])
        row = torch.cat([self._range[c.start : c.start + len(c.tokens)] + c.slot * self.capacity for c in chunks])
        ends = torch.tensor([len(c.tokens) for c in chunks]).cumsum(0)
        bounds = [0, *ends.tolist()]
        masks = [self._causal_mask(c.start, len(c.tokens)) for c in chunks]

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)  # [N, Hq, D]
            for chunk, mask, begin, end in zip(chunks, masks, bounds[:-1], bounds[1:], strict=True):
                seen = chunk.start + len(chunk.tokens)
                out[begin:end] = F.scaled_dot_product_attention(
                    q[begin:end].transpose(0, 1)[None],
                    keys[chunk.slot, :seen].transpose(0, 1)[None],
                    values[chunk.slot, :seen].transpose(0, 1)[None],
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            return out

        hidden = self._run(weights, tokens, position, row, attend)
        return self._logits(weights, hidden[ends - 1])

    def decode(self, weights: Weights, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """One more token for slots ``0 .. B-1``: ``tokens [B]`` take positions ``lengths [B]``; logits ``[B, V]``."""
        batch = tokens.shape[0]
        row = torch.arange(batch) * self.capacity + lengths
        longest = int(lengths.max()) + 1
        hidden_keys = self._range[:longest] > lengths[:, None]
        mask = torch.zeros(batch, longest).masked_fill_(hidden_keys, -torch.inf)[:, None, None, :]
        grouped = (batch, self.kv_heads, self.q_heads // self.kv_heads, self.head_size)

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            # The G query heads of a key head are laid out as G query positions, so nothing is repeated.
            out = F.scaled_dot_product_attention(
                q.reshape(grouped),
                keys[:batch, :longest].transpose(1, 2),
                values[:batch, :longest].transpose(1, 2),
                attn_mask=mask,
            )
            return out.reshape(batch, self.q_heads, self.head_size)

        return self._logits(weights, self._run(weights, tokens, lengths, row, attend))

    def _causal_mask(self, start: int, count: int) -> torch.Tensor | None:
        if start == 0:
            return None
        return self._range[None, : start + count] <= self._range[start : start + count, None]

    def _run(
        self, weights: Weights, tokens: torch.Tensor, position: torch.Tensor, row: torch.Tensor, attend: _Attend
    ) -> torch.Tensor:
        """Hidden states ``[N, C]`` before the last norm; writes keys and values to cache rows ``row [N]``."""
        eps, heads = self.config.rms_norm_eps, self.q_heads + self.kv_heads
        width, head_size, count = (self.config.hidden_size,), self.head_size, tokens.shape[0]
        rotation = self.rotation[position][:, None, :]
        x = weights.embedding[tokens]
        for index, layer in enumerate(weights.layers):
            keys, values = self.cache[index, 0], self.cache[index, 1]
            qkv = torch.mm(F.rms_norm(x, width, layer.attention_norm, eps), layer.qkv).view(count, -1, head_size)
            qk = F.rms_norm(qkv[:, :heads], (head_size,), None, eps) * layer.qk_norm
            pairs = torch.view_as_complex(qk.view(count, heads, head_size // 2, 2)) * rotation
            qk = torch.view_as_real(pairs).view(count, heads, head_size)
            keys.view(-1, self.kv_heads, head_size).index_copy_(0, row, qk[:, self.q_heads :])
            values.view(-1, self.kv_heads, head_size).index_copy_(0, row, qkv[:, heads:])
            mixed = attend(qk[:, : self.q_heads], keys, values)
            x = torch.addmm(x, mixed.reshape(count, -1), layer.out)
            gate, up = torch.mm(F.rms_norm(x, width, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down)
        return x

    def _logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, (self.config.hidden_size,), weights.norm, self.config.rms_norm_eps)
        return torch.mm(normed, weights.head)
