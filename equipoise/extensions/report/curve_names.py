"""Quantities and run stages in the names of metrics, by which learning curves share a chart."""

import re
from collections.abc import Mapping

__all__ = ["group_curves", "is_learning_rate", "split_name"]

Curve = Mapping[float, float]
CurvesByStage = dict[str, Curve]

# Words in the names of metrics, and the run stage that they mean.
_STAGES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
}
# Short names of quantities, and their long ones.
_LONG = {"acc": "accuracy"}
# Separates the name of a metric from the number of its loader.
_LOADER_MARK = "/dataloader_idx_"
# The suffix of values of an epoch or a step, after a name.
_SUFFIX = r"(?<=.)[/_.-](epoch|step)$"
_SEPARATORS = r"[/_.\s-]+"


def split_name(name: str) -> tuple[str, str]:
    """Split a metric's name into the measured quantity and the run stage; the latter may be empty.

    Returns:
        The quantity, and the run stage with the number of the loader.

    Example:
        >>> split_name("val_acc"), split_name("train/loss_epoch"), split_name("lr-Adam")
        (('accuracy', 'val'), ('loss', 'train'), ('lr-Adam', ''))
    """
    # 1. Remove the suffixes that the trainer adds.
    name, _, loader = name.partition(_LOADER_MARK)
    name = re.sub(_SUFFIX, "", name)
    # 2. Take out the first word that names a run stage. A name that consists of this word alone stays.
    words = re.split(_SEPARATORS, name)
    stage_word = next((word for word in words if word.lower() in _STAGES), "")
    if stage_word and len(words) > 1:
        words.remove(stage_word)
        name = " ".join(filter(None, words)) or name
    # 3. Put run stage and loader together.
    stage = _STAGES.get(stage_word.lower(), "")
    run_stage = f"{stage} {loader}".strip()
    return _LONG.get(name.lower(), name), run_stage


def is_learning_rate(name: str) -> bool:
    """Return whether a metric is a learning rate: a metric to loggers, of which no value is the best."""
    return name.startswith("lr-")


def group_curves(curves: Mapping[str, Curve]) -> dict[str, CurvesByStage]:
    """Group curves by quantity, then by run stage: losses first, then quantities with several curves.

    Args:
        curves: For every metric's name its values, by steps.

    Example:
        >>> group_curves({"acc": {1: 0.5}, "train_loss": {1: 0.9}, "val_loss": {1: 1.0}})
        {'loss': {'train': {1: 0.9}, 'val': {1: 1.0}}, 'accuracy': {'': {1: 0.5}}}
    """
    # 1. Collect the curves of each quantity.
    families: dict[str, CurvesByStage] = {}
    for name, curve in curves.items():
        quantity, run_stage = split_name(name)
        if _has_steps(name, curves):
            run_stage = f"{run_stage} (epoch)".strip()
        members = families.setdefault(quantity, {})
        # Two metrics of one meaning, such as "val_acc" and "val_accuracy", keep their names.
        if run_stage in members:
            members[name] = curve
        else:
            members[run_stage] = curve

    # 2. Put them in order. False comes before True, and equals keep the order of `curves`.
    def position(quantity: str) -> tuple[bool, bool, bool]:
        is_other_than_loss = "loss" not in quantity.lower()
        is_single = len(families[quantity]) == 1
        return is_learning_rate(quantity), is_other_than_loss, is_single

    return {quantity: families[quantity] for quantity in sorted(families, key=position)}


def _has_steps(name: str, curves: Mapping[str, Curve]) -> bool:
    """Return True if a curve holds values of epochs and another one those of steps: `loss` and `loss_step`."""
    base, mark, loader = name.partition(_LOADER_MARK)
    return f"{base}_step{mark}{loader}" in curves
