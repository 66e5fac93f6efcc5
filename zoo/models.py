"""Twenty-five transformers models, each made tiny with random weights: one row a model.

A row says which classes make the model, how its configuration is shrunk and what it is called
with. `make` gives ``(model, args, kwargs)``: in eval mode, on the CPU, in float32, with the same
weights and inputs every time, and without changing the caller's random state. Nothing is
downloaded. Every model has at least four repeated blocks, so that it can be cut in four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

BATCH, LENGTH, VOCABULARY = 5, 12, 99
HIDDEN, HEADS, LAYERS = 32, 4, 4

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One row: the class and configuration of transformers, and the inputs.

    ``config`` holds the settings that make the configuration tiny, ``inputs`` makes the keyword
    arguments of a call. ``modules`` register operators that the model calls and torch lacks.
    ``single_only`` is a model with an operator that knows no float64.
    """

    name: str
    model_class: str
    config_class: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    modules: tuple[str, ...] = ()
    single_only: bool = False

    def make(
        self, seed: int = 0, *, dropout: bool = True, layers: int = LAYERS
    ) -> tuple[torch.nn.Module, tuple[()], Inputs]:
        """The model and the arguments of a call, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            settings = with_layers(self.config, layers)
            config = getattr(transformers, self.config_class)(**settings)
            if not dropout:
                without_dropout(config)
            model = getattr(transformers, self.model_class)(config).eval()
            return model, (), self.inputs()


def with_layers(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """Settings with so many layers; those that count blocks by stage stay as they are."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found[key] = with_layers(value, layers)
        elif key == "layer_types":
            found[key] = value[:layers]
        else:
            found[key] = layers if "layer" in key else value
    return found


def without_dropout(config: transformers.PreTrainedConfig) -> None:
    """Set every rate of dropout in a configuration, and in those it is made of, to zero."""
    for key, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def tokens(length: int = LENGTH) -> torch.Tensor:
    """Random token ids of ``[BATCH, length]``; the first few ids, often special, do not occur."""
    return torch.randint(5, VOCABULARY, (BATCH, length))


def text() -> Inputs:
    """Token ids alone."""
    return {"input_ids": tokens()}


def padded_text() -> Inputs:
    """Token ids with a mask: the second sentence is shorter."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, LENGTH - 4 :] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def text_pair() -> Inputs:
    """Token ids for an encoder and, of another length, for its decoder."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(8)}


def image(size: int = 32) -> Inputs:
    """Images of ``[BATCH, 3, size, size]``."""
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def image_and_text() -> Inputs:
    """Images and captions."""
    return {**image(), **padded_text()}


def speech_and_text() -> Inputs:
    """Log-mel features of ``[BATCH, 16, 40]`` and token ids for the decoder."""
    return {"input_features": torch.randn(BATCH, 16, 40), "decoder_input_ids": tokens(8)}


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "use_cache": False,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
ENCODER = {key: value for key, value in DECODER.items() if key != "use_cache"}
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
SEQ2SEQ = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}

MODELS: tuple[ZooModel, ...] = (
    ZooModel(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 64,
            "use_cache": False,
        },
        text,
    ),
    ZooModel("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED, text),
    ZooModel(
        "mistral", "MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 8}, text
    ),
    ZooModel(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        text,
        modules=("transformers.integrations.moe",),
        single_only=True,
    ),
    ZooModel("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED, padded_text),
    ZooModel("qwen3", "Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}, text),
    ZooModel("gemma", "GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}, text),
    ZooModel(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
        text,
    ),
    ZooModel("phi", "PhiForCausalLM", "PhiConfig", DECODER, text),
    ZooModel(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {key: value for key, value in DECODER.items() if key != "intermediate_size"},
        text,
    ),
    ZooModel(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {key: value for key, value in DECODER.items() if key != "intermediate_size"}
        | {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN},
        text,
    ),
    ZooModel(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "use_cache": False,
        },
        text,
    ),
    ZooModel(
        "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER | {"rotary_pct": 0.5}, text
    ),
    ZooModel(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "state_size": 4,
            "use_cache": False,
        },
        text,
    ),
    ZooModel("bert", "BertForMaskedLM", "BertConfig", ENCODER, padded_text),
    ZooModel("roberta", "RobertaForMaskedLM", "RobertaConfig", ENCODER, padded_text),
    ZooModel(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": HIDDEN,
            "hidden_dim": 2 * HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_position_embeddings": 64,
        },
        padded_text,
    ),
    ZooModel(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": HIDDEN // HEADS,
            "d_ff": 2 * HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        text_pair,
    ),
    ZooModel(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        SEQ2SEQ | {"max_position_embeddings": 64},
        text_pair,
    ),
    ZooModel("vit", "ViTForImageClassification", "ViTConfig", VISION, image),
    ZooModel(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2, 2],
            "num_heads": [2, 4, 4],
            "window_size": 4,
        },
        image,
    ),
    ZooModel(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_stages": 4},
        image,
    ),
    ZooModel(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
        image,
    ),
    ZooModel(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": ENCODER, "vision_config": VISION, "projection_dim": 16},
        image_and_text,
    ),
    ZooModel(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ
        | {
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        speech_and_text,
    ),
)
"""The table, one row a model, in the order in which results are printed."""

BY_NAME = {row.name: row for row in MODELS}
