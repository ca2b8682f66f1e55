"""The run stages, and the outermost keys of a configuration."""

__all__ = ["GROUPS", "KEYS", "STAGES"]

STAGES = ("fit", "validate", "test", "predict")
GROUPS = ("trainer", "strategy", "precision", "callbacks", "logger", "launcher", "module", "data", "experiment")
KEYS = (*GROUPS, "stage", "seed", "ckpt_path", "test", "objective", "output_dir", "hydra")
