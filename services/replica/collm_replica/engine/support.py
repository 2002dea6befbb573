"""Which models can be served."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from collm_common.errors import ModelError
from collm_replica.engine.config import EngineConfig
from collm_replica.models import SUPPORTED

_SILU = ("silu", "swish")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class KvShape:
    """What one token leaves behind: `layers` times keys and values of `heads` times `head_dim`."""

    layers: int
    heads: int
    head_dim: int


def kv_shape(model: PreTrainedModel) -> KvShape:
    """Raises ModelError, by name and reason, if the model cannot be served."""
    name = type(model).__name__
    if name not in SUPPORTED:
        raise ModelError(f"{name} cannot be served, only {', '.join(SUPPORTED)}")
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise ModelError(f"{name} with rope_type {rope} cannot be served: positions would depend on the batch")
    if config.hidden_act not in _SILU:
        raise ModelError(f"{name} with hidden_act {config.hidden_act} cannot be served, only {_SILU[0]}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(config.num_hidden_layers, config.num_key_value_heads, head_dim)


def check_context(model: PreTrainedModel, config: EngineConfig, capacity_tokens: int) -> None:
    """Raises ModelError unless one request of `context_tokens` fits the model and the KV budget."""
    name, longest = type(model).__name__, model.config.max_position_embeddings
    if config.context_tokens > longest:
        raise ModelError(f"{name} has {longest} positions, fewer than context_tokens {config.context_tokens}")
    if config.context_tokens > capacity_tokens:
        raise ModelError(
            f"{name}: kv_bytes {config.kv_bytes} hold {max(0, capacity_tokens)} tokens, "
            f"fewer than context_tokens {config.context_tokens}"
        )
