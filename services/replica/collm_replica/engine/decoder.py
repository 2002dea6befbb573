"""The decoder of the Llama family over the modules' own weights: q, k, v and gate, up are one product each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from collm_replica.engine.groups import Group
from collm_replica.engine.operators import Inputs, Layer, Norm, Operators
from collm_replica.engine.slots import Place

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

Banks = Mapping[str, Tensor]
"""Memory for the slots of fused groups, by `model.layers.N.GROUP`."""


class Decoder:
    """Runs a Hugging Face model of a served family; the model keeps its names, its weights become views of groups."""

    def __init__(
        self,
        model: PreTrainedModel,
        operators: Operators,
        slots: int,
        max_rank: int,
        context_tokens: int,
        banks: Banks | None = None,
    ) -> None:
        self.places: dict[str, Place] = {}
        self._slots, self._max_rank, self._banks = slots, max_rank, banks or {}
        self._operators = operators
        body: Any = model.model
        self._embedding: Tensor = body.embed_tokens.weight
        self.head: Tensor = model.lm_head.weight
        self._norm = Norm.of(body.norm)
        self.layers = [self._layer(index, module, model.config) for index, module in enumerate(body.layers)]
        positions = torch.arange(context_tokens, device=self._embedding.device)[None]
        self._cos, self._sin = (table[0].contiguous() for table in body.rotary_emb(self._embedding, positions))

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits `[len(keep), vocabulary]`; keys and values are stored on the way."""
        math, selection = self._operators, inputs.selection
        x = embedding(inputs.ids, self._embedding)
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        h = math.normalise(x, self.layers[0].norm)
        for layer, following in self._with_next_norm():
            seen = math.attention(layer, h, cos, sin, inputs)
            x, h = math.add(layer.out, seen, x, layer.mlp_norm, selection)
            z = math.gated(layer.gate_up, h, selection)
            x, h = math.add(layer.down, z, x, following, selection)
        return linear(h if inputs.keep is None else h[inputs.keep], self.head)

    def _with_next_norm(self) -> Iterator[tuple[Layer, Norm]]:
        norms = [*(layer.norm for layer in self.layers[1:]), self._norm]
        return zip(self.layers, norms, strict=True)

    def _layer(self, index: int, module: Any, config: Any) -> Layer:
        attention = module.self_attn
        groups = {name: self._group(index, module, name) for name in _FUSED}
        return Layer(
            index=index,
            norm=Norm.of(module.input_layernorm),
            q_norm=Norm.of(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=Norm.of(attention.k_norm) if hasattr(attention, "k_norm") else None,
            mlp_norm=Norm.of(module.post_attention_layernorm),
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
            **groups,
        )

    def _group(self, index: int, module: nn.Module, name: str) -> Group:
        linears: list[Any] = [module.get_submodule(path) for path in _FUSED[name]]
        prefix = f"model.layers.{index}"
        group = Group(linears, self._slots, self._max_rank, self._banks.get(f"{prefix}.{name}"))
        if self._slots:
            self.places |= {f"{prefix}.{path}": Place(group, part) for part, path in enumerate(_FUSED[name])}
        return group
