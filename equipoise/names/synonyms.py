"""Words of other libraries, of older versions and of everyday speech for what has another name here."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

__all__ = [
    "FOREIGN_PRECISIONS",
    "keys_named",
    "meant_commands",
    "meant_hooks",
    "meant_keys",
    "meant_options",
    "similar_step",
]

# By the key of a configuration: other words for it.
_KEYS = {
    "trainer.max_epochs": "epoch epochs n_epoch n_epochs nb_epochs num_epochs num_train_epochs total_epochs",
    "trainer.max_steps": "steps n_steps num_steps num_train_steps total_steps max_iters iterations",
    "trainer.devices": "gpu gpus n_gpu n_gpus num_gpus tpu_cores ipus num_devices nproc_per_node num_processes"
    " parallel_devices device_ids auto_select_gpus stages n_stages num_stages",
    "trainer.num_nodes": "nodes nnodes machines num_machines",
    "trainer.accelerator": "device",
    "trainer.accumulate_grad_batches": "accumulate accumulation_steps accumulate_grad grad_accum grad_accum_steps"
    " gradient_accumulation gradient_accumulation_steps",
    "trainer.gradient_clip_val": "clip clip_grad clip_grad_norm clip_norm grad_clip grad_norm gradient_clip"
    " gradient_clipping max_grad_norm max_norm",
    "trainer.val_check_interval": "eval_steps eval_every eval_interval val_every val_interval",
    "trainer.log_every_n_steps": "log_every log_interval logging_steps row_log_interval",
    "trainer.enable_progress_bar": "progress progress_bar progress_bar_refresh_rate disable_tqdm",
    "trainer.enable_model_summary": "weights_summary model_summary",
    "trainer.enable_checkpointing": "checkpoint_callback",
    "trainer.fast_dev_run": "debug dry_run smoke smoke_test",
    "trainer.compile": "torch_compile",
    "trainer.activation_checkpointing": "gradient_checkpointing checkpoint_activations",
    "trainer.detect_anomaly": "anomaly terminate_on_nan",
    "trainer.use_distributed_sampler": "replace_sampler_ddp",
    "ckpt_path": "ckpt checkpoint checkpoint_path resume resume_from resume_from_checkpoint load_from load_checkpoint",
    "precision=16-mixed": "amp fp16 mixed_precision",
    "precision=bf16-mixed": "bf16",
    "precision": "amp_backend amp_level dtype torch_dtype",
    "strategy": "distributed distributed_backend distributed_type parallel",
    "seed": "random_seed random_state manual_seed",
    "logger": "log log_to report_to",
    "output_dir": "log_dir out out_dir output save_dir root_dir default_save_path weights_save_path",
    "objective": "metric monitor metric_for_best_model",
    "callbacks": "cb hooks",
    "callbacks=[batch_size_finder]": "auto_scale_batch_size scale_batch_size",
    "callbacks=[learning_rate_finder]": "auto_lr_find find_lr lr_find lr_finder",
    "callbacks=[stochastic_weight_averaging]": "stochastic_weight_avg swa",
    "module": "model net network lightning_module",
    "data": "dataset datamodule dm dataloader",
    "experiment": "exp",
    # Arguments of a module or of data have no fixed names.
    "module.lr": "learning_rate lr",
    "module.learning_rate": "lr",
    "data.batch_size": "batch batchsize bs per_device_train_batch_size train_batch_size",
    "data.num_workers": "workers n_workers num_proc dataloader_num_workers",
}

# By the command: words that people type for it.
_COMMANDS = {
    "fit": "train training learn run start resume continue",
    "validate": "eval evaluate evaluation val valid validation",
    "test": "testing",
    "predict": "infer inference generate prediction",
    "compare": "benchmark bench",
    "runs": "ls list history experiments",
    "init": "new create start-project",
    "doctor": "env info bug-report check",
    "devices": "gpus nvidia-smi",
    "watch": "dashboard ui tensorboard",
}

FOREIGN_PRECISIONS = {
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "amp": "16-mixed",
    "mixed": "16-mixed",
    "half": "16-true",
    "bfloat16": "bf16-mixed",
    "fp32": "32-true",
    "float32": "32-true",
    "full": "32-true",
    "fp64": "64-true",
    "float64": "64-true",
    "double": "64-true",
}

_OPTIONS = {
    "precision": FOREIGN_PRECISIONS,
    "logger": {
        "tb": "tensorboard",
        "wb": "wandb",
        "weights_and_biases": "wandb",
        "comet_ml": "comet",
        "false": "none",
        "null": "none",
    },
    "callbacks": {
        "checkpoint": "model_checkpoint",
        "checkpointing": "model_checkpoint",
        "ema": "ema_weight_averaging",
        "swa": "stochastic_weight_averaging",
        "lr_monitor": "learning_rate_monitor",
        "lr_finder": "learning_rate_finder",
    },
}


# Methods without the prefix `on_`. Names of a user's own methods are often similar, so they must be almost the same.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_model")
_MIN_SIMILARITY_OF_STEPS = 0.9
# Hooks of Lightning 1.x and of other libraries, and steps.
_HOOKS = {
    "training_step": "train_step",
    "validation_step": "val_step valid_step eval_step",
    "predict_step": "prediction_step",
    "configure_optimizers": "get_optimizers make_optimizers setup_optimizers",
    "on_train_start": "on_train_begin on_fit_begin",
    "on_train_epoch_start": "on_epoch_start on_epoch_begin on_train_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "on_batch_start on_batch_begin on_train_batch_begin on_step_begin",
    "on_train_batch_end": "on_batch_end on_step_end",
    "on_validation_start": "on_validation_begin on_evaluate_begin",
    "on_validation_end": "on_evaluate on_evaluate_end",
}


def similar_step(name: str) -> str | None:
    """Return the step of a module whose name is almost the same as another name; None if there is none.

    Args:
        name: The name of a method.
    """
    similar = get_close_matches(name, _STEPS, n=1, cutoff=_MIN_SIMILARITY_OF_STEPS)
    return next(iter(similar), None)


def meant_hooks(word: str) -> list[str]:
    """Return the hooks and steps that the name of a method may stand for.

    Example:
        >>> meant_hooks("on_epoch_end")
        ['on_train_epoch_end']
    """
    return _with_word(_HOOKS, word)


def meant_keys(word: str) -> list[str]:
    """Return the keys of a configuration that a word may stand for.

    Example:
        >>> meant_keys("gpus")
        ['trainer.devices']
        >>> meant_keys("max_epochs")
        []
    """
    return _with_word(_KEYS, word)


def keys_named(name: str) -> list[str]:
    """Return the keys, of those that words may stand for, whose last part is a name.

    Example:
        >>> keys_named("devices")
        ['trainer.devices']
    """
    return [key for key in _KEYS if key.rpartition(".")[2] == name]


def meant_commands(word: str, commands: Sequence[str]) -> list[str]:
    """Return the commands, of those that are present, that a word may stand for.

    Example:
        >>> meant_commands("train", ["fit", "test"])
        ['fit']
    """
    return [name for name in _with_word(_COMMANDS, word) if name in commands]


def meant_options(group: str, word: str, options: Sequence[str]) -> list[str]:
    """Return the options, of those that a group of the configuration has, that a word may stand for.

    Example:
        >>> meant_options("precision", "fp16", ["16-mixed", "32-true"])
        ['16-mixed']
    """
    # Versions of Lightning have different callbacks, so an option may be missing.
    option = _OPTIONS.get(group, {}).get(word.lower(), "")
    return [option] if option in options else []


def _with_word(table: Mapping[str, str], word: str) -> list[str]:
    return [name for name, words in table.items() if word.lower() in words.split()]
