"""Models of transformers: base models, and models for tasks, which compute their loss."""

from functools import partial
from typing import Any

import torch
from catalogue import Model
from torch import Generator, Tensor, nn

__all__ = ["base_models", "task_models"]

TEXT = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "gpt2", "gpt_neo", "gpt_neox"),
    *("opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "falcon", "bloom", "mpt"),
    *("stablelm", "mamba", "xlnet", "mixtral"),
)
PAIRS = ("t5", "bart", "mbart", "pegasus", "m2m_100")
VISION = ("vit", "deit", "beit", "swin", "convnext", "segformer", "dinov2", "resnet")
AUDIO = ("wav2vec2", "hubert", "whisper")

WORDS, LABELS, WIDTH = 99, 3, 32

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "d_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": WORDS,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "attention_types": [[["global", "local"], 2]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by their names in configurations; a model takes those that it has."""

HIERARCHY = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
WAVES: dict[str, Any] = {
    "conv_dim": [32] * 3,
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "t5": {"decoder_start_token_id": 0},
    "mamba": {"state_size": 8},
    "whisper": {
        "num_mel_bins": 20,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
    },
    "wav2vec2": {**WAVES, "ctc_loss_reduction": "mean"},
    "hubert": WAVES,
    "mixtral": {"experts_implementation": "eager"},  # torch's grouped product has no double precision
}
"""What some models need beside these sizes."""

WHOLE: dict[str, dict[str, Any]] = {
    "convnext": HIERARCHY,
    "resnet": {**HIERARCHY, "embedding_size": 16, "layer_type": "basic"},
    "segformer": {
        "hidden_sizes": [8, 16, 24, 32],
        "num_attention_heads": [1, 2, 3, 4],
        "depths": [1, 1, 1, 1],
        "mlp_ratios": [2, 2, 2, 2],
        "decoder_hidden_size": 16,
    },
    "swin": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 2,
        "patch_size": 2,
        "image_size": 32,
    },
}
"""All sizes of models that have one for each of their levels."""


LEFT_OUT = {"falcon": {"head_dim"}, "xlnet": {"max_position_embeddings"}}

TASKS = (
    ("bert", "MaskedLM", "labels"),
    ("bert", "SequenceClassification", "samples"),
    ("roberta", "TokenClassification", "labels"),
    ("electra", "QuestionAnswering", "samples"),
    ("gpt2", "CausalLM", "next labels"),
    ("llama", "CausalLM", "next labels"),
    ("opt", "CausalLM", "next labels"),
    ("mistral", "CausalLM", "next labels"),
    ("qwen2", "CausalLM", "next labels"),
    ("t5", "Seq2SeqLM", "labels"),
    ("bart", "Seq2SeqLM", "labels"),
    ("vit", "ImageClassification", "samples"),
    ("segformer", "SemanticSegmentation", "samples"),
    ("wav2vec2", "CTC", "samples"),
    ("wav2vec2", "AudioClassification", "samples"),
    ("whisper", "SpeechSeq2Seq", "labels"),
)
"""The kind, the task, and what the loss is the mean of."""


def base_models() -> list[Model]:
    """Models without a head."""
    models = []
    for name in (*TEXT, *PAIRS, *VISION, *AUDIO):
        batch = partial(inputs, name)
        models.append(Model(name, "transformers", partial(make_base, name), batch))
    make = partial(make_base, "mixtral", use_cache=False)
    models.append(Model("mixtral, use_cache=False", "transformers", make, partial(inputs, "mixtral")))
    return models


def task_models() -> list[Model]:
    """Models with a head and a loss."""
    models = []
    for name, task, loss in TASKS:
        batch = partial(labelled, name, task)
        models.append(Model(f"{name} {task}", "transformers", partial(make_for, name, task), batch, loss=loss))
    return models


def make_base(name: str, **options: Any) -> nn.Module:
    import transformers

    chosen = configuration(name)
    for key, value in options.items():
        setattr(chosen, key, value)
    model: nn.Module = transformers.AutoModel.from_config(chosen)
    return model


def make_for(name: str, task: str) -> nn.Module:
    import transformers

    chosen = configuration(name)
    if task.endswith(("Classification", "Segmentation")):
        chosen.num_labels = LABELS
    model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(chosen)
    return model


def configuration(name: str) -> Any:
    """A small configuration without dropout."""
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    usual = kind()
    sizes = WHOLE.get(name)
    if sizes is None:
        taken = {key: value for key, value in SMALL.items() if hasattr(usual, key)}
        sizes = {key: value for key, value in taken.items() if key not in LEFT_OUT.get(name, ())}
    experts = SPECIAL.get(name, {}).get("experts_implementation")
    chosen = kind(**{**sizes, **_dropout(usual), **SPECIAL.get(name, {})})
    if experts:
        chosen._experts_implementation = experts
    return chosen


def _dropout(usual: Any) -> dict[str, float]:
    """The options of a configuration that drop or mask something at random, set to zero."""
    options = {}
    for key, value in usual.to_dict().items():
        drops = "drop" in key or key in ("mask_time_prob", "mask_feature_prob")
        if drops and isinstance(value, float):
            options[key] = 0.0
    return options


def inputs(name: str, count: int, generator: Generator) -> dict[str, Tensor]:
    """The inputs of a model."""
    if name in VISION:
        return {"pixel_values": _noise(generator, count, 3, 32, 32)}
    if name == "whisper":
        return {
            "input_features": _noise(generator, count, 20, 64),
            "decoder_input_ids": _words(generator, count, 6),
        }
    if name in AUDIO:
        return {"input_values": _noise(generator, count, 2000)}
    batch = {"input_ids": _words(generator, count, 12)}
    if name != "mamba":
        batch["attention_mask"] = torch.ones(count, 12, dtype=torch.long)
        batch["attention_mask"][0, 8:] = 0  # the first sample is shorter
    if name in PAIRS:
        batch["decoder_input_ids"] = batch["input_ids"][:, :7].clone()
    return batch


def labelled(name: str, task: str, count: int, generator: Generator) -> dict[str, Tensor]:
    """The inputs of a model, and what it shall predict."""
    batch = inputs(name, count, generator)
    if task in ("MaskedLM", "CausalLM", "TokenClassification"):
        batch["labels"] = batch["input_ids"].clone()
        if task == "TokenClassification":
            batch["labels"] %= LABELS
        batch["labels"][:, :3] = -100
        batch["labels"][batch["attention_mask"] == 0] = -100
    elif task in ("Seq2SeqLM", "SpeechSeq2Seq"):
        batch.pop("decoder_input_ids")
        batch["labels"] = _words(generator, count, 7)
        batch["labels"][0, 5:] = -100
    elif task == "QuestionAnswering":
        batch["start_positions"] = torch.randint(0, 4, (count,), generator=generator)
        batch["end_positions"] = torch.randint(4, 8, (count,), generator=generator)
    else:
        shape = {"SemanticSegmentation": (count, 32, 32), "CTC": (count, 5)}.get(task, (count,))
        least, most = (3, 30) if task == "CTC" else (0, LABELS)
        batch["labels"] = torch.randint(least, most, shape, generator=generator)
    return batch


def _words(generator: Generator, *shape: int) -> Tensor:
    return torch.randint(3, WORDS, shape, generator=generator)


def _noise(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
