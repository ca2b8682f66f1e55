"""Quantities and run stages in the names of metrics, by which learning curves share a chart."""

import re
from collections.abc import Mapping

__all__ = ["group_curves", "split_name"]

Curve = Mapping[float, float]

# Words in the names of metrics, and the run stage that they mean.
_STAGES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
_LONG = {"acc": "accuracy"}


def split_name(name: str) -> tuple[str, str]:
    """Split a metric's name into the measured quantity and the run stage; the latter may be empty.

    Args:
        name: The name, as it was logged.

    Returns:
        The quantity, and the run stage with the number of the loader.

    Example:
        >>> split_name("val_acc"), split_name("train/loss_epoch"), split_name("lr-Adam")
        (('accuracy', 'val'), ('loss', 'train'), ('lr-Adam', ''))
    """
    # 1. Remove the suffixes that the trainer adds.
    name, _, loader = name.partition("/dataloader_idx_")
    name = re.sub(r"(?<=.)[/_.-](epoch|step)$", "", name)
    # 2. Take out the first word that names a run stage.
    words = re.split(r"[/_.\s-]+", name)
    stage_word = _first_stage_word(words)
    if stage_word is not None and len(words) > 1:
        words.remove(stage_word)
        remaining = " ".join(filter(None, words))
        name = remaining or name
    # 3. Put run stage and loader together.
    run_stage = []
    if stage_word is not None:
        stage = _STAGES[stage_word.lower()]
        run_stage.append(stage)
    if loader:
        run_stage.append(loader)
    quantity = _LONG.get(name.lower(), name)
    return quantity, " ".join(run_stage)


def _first_stage_word(words: list[str]) -> str | None:
    for word in words:
        if word.lower() in _STAGES:
            return word
    return None


def group_curves(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Group curves by quantity, then by run stage: losses first, then quantities with several curves.

    Args:
        curves: For every metric's name its values, by steps.

    Example:
        >>> group_curves({"acc": {1: 0.5}, "train_loss": {1: 0.9}, "val_loss": {1: 1.0}})
        {'loss': {'train': {1: 0.9}, 'val': {1: 1.0}}, 'accuracy': {'': {1: 0.5}}}
    """
    families: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        family, run_stage = split_name(name)
        if _has_steps(name, curves):
            run_stage = f"{run_stage} (epoch)".strip()
        members = families.setdefault(family, {})
        # Two metrics of one meaning, such as "val_acc" and "val_accuracy", keep their names.
        if run_stage in members:
            members[name] = curve
        else:
            members[run_stage] = curve

    def rank(family: str) -> tuple[bool, bool]:
        is_loss = "loss" in family.lower()
        is_single = len(families[family]) == 1
        return not is_loss, is_single

    return {family: families[family] for family in sorted(families, key=rank)}


def _has_steps(name: str, curves: Mapping[str, Curve]) -> bool:
    """Return True if a curve holds values of epochs and another one those of steps: `loss` and `loss_step`."""
    base, mark, loader = name.partition("/dataloader_idx_")
    return f"{base}_step{mark}{loader}" in curves
