"""LoRA by PEFT on a model whose base weights belong to someone else: float32 adapters, everything else frozen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from collm_common.errors import AdapterError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DEFAULT = ".default."


class Lora:
    """Adapter of one rank around `model`; tensors go in and out under the names that PEFT saves."""

    def __init__(self, model: PreTrainedModel, rank: int, alpha: float) -> None:
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LINEARS), task_type="CAUSAL_LM")  # type: ignore[arg-type]
        self.rank, self.alpha = rank, alpha
        with warnings.catch_warnings():
            # PEFT asks the model by a name that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            self.model: Any = get_peft_model(model, config, autocast_adapter_dtype=True)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.float()
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):
                # Left to autocast (`loss.precision`): a float32 copy of every activation costs more than the adapter.
                setattr(module, "cast_input_dtype_enabled", model.dtype == torch.float32)  # noqa: B010

    def detach(self) -> PreTrainedModel:
        """The plain model again."""
        base: PreTrainedModel = self.model.unload()
        return base

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for _, parameter in self._named()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies in float32 on the CPU."""
        return {name: parameter.detach().to("cpu", torch.float32, copy=True) for name, parameter in self._named()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite all. Raises AdapterError unless names and shapes are exactly these."""
        own = dict(self._named())
        if set(own) != set(tensors):
            raise AdapterError(f"adapter tensors differ from the model's, such as {min(set(own) ^ set(tensors))}")
        for name, parameter in own.items():
            if parameter.shape != tensors[name].shape:
                raise AdapterError(f"{name} is {tuple(tensors[name].shape)}, must be {tuple(parameter.shape)}")
            parameter.data.copy_(tensors[name])

    def fresh(self, seed: int) -> dict[str, torch.Tensor]:
        """Weights that depend on the seed alone: A as PEFT draws it, B zero, so that they begin as the base."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.zeros(parameter.shape)
            if ".lora_B." in name
            else fresh_a(parameter.shape[0], parameter.shape[1], generator)
            for name, parameter in self._named()
        }

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                yield name.replace(_DEFAULT, "."), parameter


def fresh_a(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A [rows, columns] as PEFT draws it: kaiming_uniform(a=sqrt(5)), which is uniform in +-1/sqrt(columns)."""
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) / math.sqrt(columns)
