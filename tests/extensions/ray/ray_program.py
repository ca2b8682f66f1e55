"""Program of the tests of Ray: it starts a small cluster, runs them and ends the cluster.

python -m tests.extensions.ray.ray_program FOLDER killed trials      # writes FOLDER/outcome.json
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.support.quiet import QUIET

SAMPLES = 22
EPOCHS = 3
# Rank and optimiser step at which workers are killed, in mid-epoch and at the first step of another one.
KILLS = ((1, 2), (0, 6))


class Net(LightningModule):
    """A network with dropout, in float64: random numbers and momentum must come back, too."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        ).double()

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loader() -> DataLoader:
    """Five and a half batches for one process, so that shares of the last step are unequal."""
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
    return DataLoader(points, batch_size=4, shuffle=True)


class Kill(Callback):
    """Kills processes, each once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        for rank, step in KILLS:
            trace = Path(self.folder, f"killed-{rank}-{step}")
            if (trainer.global_rank, trainer.global_step) == (rank, step) and not trace.exists():
                trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Weights(Callback):
    """Writes the weights at the end, and how the process was placed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module) -> None:
        if trainer.is_global_zero:
            torch.save(
                {"weights": pl_module.state_dict(), "world_size": trainer.world_size, "steps": trainer.global_step},
                self.path,
            )


def killed_loop(config: dict[str, str]) -> None:
    """Train in a worker of Ray Train; of the trainer's arguments none says where."""
    from equipoise.extensions.ray.ray import RayReport

    torch.set_num_threads(1)
    folder = config["folder"]
    callbacks = [Kill(folder), RayReport(every_n_train_steps=1), Weights(f"{folder}/weights.pt")]
    Trainer(max_epochs=EPOCHS, callbacks=callbacks, **QUIET).fit(Net(), loader(), ckpt_path="last")


def rays_own_loop(config: dict[str, str]) -> None:
    """Train with the callback that Ray has for Lightning."""
    from ray.train.lightning import RayTrainReportCallback

    torch.set_num_threads(1)
    Trainer(max_epochs=1, callbacks=[RayTrainReportCallback()], **QUIET).fit(Net(), loader(), ckpt_path="last")


def trial(config: dict[str, Any]) -> None:
    """Train in a trial of Ray Tune, the last one in processes that the strategy starts."""
    from equipoise.extensions.ray.ray import RayReport

    torch.set_num_threads(1)
    choice = config["choice"]
    place = {"accelerator": "cpu", "strategy": choice["strategy"], "devices": choice["devices"]}
    Trainer(max_epochs=2, callbacks=[RayReport()], **place, **QUIET).fit(Net(choice["lr"]), loader())


def trained_by_rays_kit(ray: Any, folder: Path, loop: Any, name: str, max_failures: int) -> Any:
    return ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "storage"),
            name=name,
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
    ).fit()


def run_killed(ray: Any, folder: Path) -> Any:
    """Two workers that are killed and started anew."""
    result = trained_by_rays_kit(ray, folder, killed_loop, "killed", len(KILLS))
    return {"metrics": result.metrics, "checkpoint": bool(result.checkpoint)}


def run_rays_own(ray: Any, folder: Path) -> Any:
    """Two workers with Ray's own callback."""
    result = trained_by_rays_kit(ray, folder, rays_own_loop, "own", 0)
    files = sorted(path.name for path in Path(result.checkpoint.path).iterdir())
    return {"metrics": result.metrics, "files": files}


def run_trials(ray: Any, folder: Path) -> Any:
    """Two trials that can report, and one whose reports would be lost."""
    space = [
        {"lr": 0.1, "strategy": "auto", "devices": 1},
        {"lr": 0.01, "strategy": "dp", "devices": 2},
        {"lr": 0.1, "strategy": "ddp", "devices": 2},
    ]
    grid = ray.tune.Tuner(
        trial,
        param_space={"choice": ray.tune.grid_search(space)},
        run_config=ray.tune.RunConfig(storage_path=str(folder / "storage"), name="tune", verbose=0),
    ).fit()
    return [{"metrics": one.metrics, "error": str(one.error) if one.error else None} for one in grid]


PARTS = {"killed": run_killed, "own": run_rays_own, "trials": run_trials}


def main(folder: Path, parts: list[str]) -> None:
    import ray
    import ray.train.torch
    import ray.tune

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
    )
    try:
        outcome = {part: PARTS[part](ray, folder) for part in parts}
    finally:
        ray.shutdown()
    (folder / "outcome.json").write_text(json.dumps(outcome, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
