"""Models as users name them: a local Hugging Face folder, a hub name, or a GGUF file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collm_common.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HUB_FILES = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve(source: str, cache_dir: str) -> Path:
    """A folder with config, tokenizer and safetensors. A GGUF file is converted once into `cache_dir`.

    Raises ModelError if nothing is found, or if the architecture is not served: before any weight is read.
    """
    path = Path(source)
    if path.is_dir():
        folder = path
    elif path.suffix == ".gguf":
        folder = _from_gguf(path, Path(cache_dir))
    elif path.exists():
        raise ModelError(f"{source} is neither a folder nor a .gguf file")
    elif path.is_absolute() or len(path.parts) > 2:
        raise ModelError(f"{source} does not exist, and is no name of the hub")
    else:
        folder = _from_hub(source)
    check_supported(folder)
    return folder


def check_supported(folder: Path) -> None:
    """Raises ModelError that names the architecture."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"{folder}: no readable config.json: {error}") from error
    architectures = config.get("architectures") or ["none"]
    _check_architecture(folder, architectures[0])


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def skeleton(folder: Path, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """The Hugging Face module with all weights on `meta`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=dtype, attn_implementation=attention)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _check_architecture(source: Path | str, architecture: str) -> None:
    if architecture not in SUPPORTED:
        raise ModelError(f"{source}: {architecture} is not served; supported: {', '.join(SUPPORTED)}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        check_supported(Path(hf_hub_download(name, "config.json")).parent)
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except ModelError:
        raise
    except Exception as error:  # the hub client raises a different family with every release
        raise ModelError(f"{name!r} is no local folder or .gguf file, and the hub gave: {error}") from error


def _from_gguf(path: Path, cache: Path) -> Path:
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    status = path.stat()
    folder = cache / f"{path.stem}-{status.st_size}-{status.st_mtime_ns}"
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _convert(path, partial)
        partial.rename(folder)
    except OSError:
        # Another process converted the same file meanwhile.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        kind = AutoConfig.from_pretrained(**where).model_type
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path} is no GGUF file of a known architecture: {error}") from error
    _check_architecture(path, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind))
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized and refuses to be saved: a fresh one takes its weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
