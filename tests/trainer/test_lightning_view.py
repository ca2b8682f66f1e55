"""What Lightning's objects look for in a trainer, they find."""

import ast
from pathlib import Path
from typing import Any

import lightning.pytorch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.conftest import ignoring
from tests.trainer.small import Validated, loader, trainer

pytestmark = ignoring("An epoch has 3 batches")


LIGHTNING = Path(lightning.pytorch.__file__).parent
READERS = ("callbacks", "core", "loggers", "profilers", "utilities")
NOT_READ = {
    "_active_loop",  # BatchSizeFinder
    "fit_loop._data_source",  # BatchSizeFinder
    "_model_registry",  # Lightning's own cloud
    "setter",  # a decorator
    "strategy.zero_stage_3",  # DeepSpeed
}


def attributes_of_trainers(tree: ast.AST) -> set[tuple[str, ...]]:
    """All chains `trainer.a.b`, `self.trainer.a.b` and the like, without the trainer."""
    found = set()
    for node in ast.walk(tree):
        names, inner = [], node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            continue
        chain = [inner.id, *reversed(names)]
        for place, name in enumerate(chain[:2]):
            if name in ("trainer", "_trainer") and chain[place + 1 :]:
                found.add(tuple(chain[place + 1 :]))
                break
    return found


def test_whatever_lightnings_objects_read_is_there(tmp_path: Path) -> None:
    """Read from their source: every attribute of a trainer that a callback, a module or a logger names."""
    run = trainer(logger=CSVLogger(tmp_path), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(Validated(), loader(), loader())
    files = [path for folder in READERS for path in (LIGHTNING / folder).rglob("*.py")]
    chains = set().union(*(attributes_of_trainers(ast.parse(path.read_text(encoding="utf-8"))) for path in files))
    assert {("callback_metrics",), ("strategy", "broadcast"), ("fit_loop", "max_epochs")} <= chains
    missing = set()
    for chain in chains:
        value: Any = run
        for depth, name in enumerate(chain, start=1):
            if not hasattr(value, name):
                missing.add(".".join(chain[:depth]))
                break
            value = getattr(value, name)
            if value is None or callable(value) or isinstance(value, (int, float, str, list, dict)):
                break
    assert missing == NOT_READ


def test_throughput_in_every_kind_of_run(tmp_path: Path) -> None:
    """Of all callbacks it reads the most."""
    module = Validated()
    module.flops_per_batch = 6
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    run = trainer(callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1, num_sanity_val_steps=0)
    run.fit(module, loader(), loader())
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    run.predict(module, loader())
    (table,) = tmp_path.rglob("metrics.csv")
    columns = table.read_text().partition("\n")[0].split(",")
    assert {f"{stage}/device/batches_per_sec" for stage in ("train", "validate", "test", "predict")} <= set(columns)
