"""Plant limits in programs, and compare what `equipoise tune` says with them. Healthy programs must have no sentence.

python benchmarks/limits/main.py                            all programs, about 15 minutes
python benchmarks/limits/main.py slow_samples slow_hook     some of them
"""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SECONDS = 20
CALLBACKS = "planted.callbacks"
VALIDATED = ("module._target_=planted.module.Validated", "data._target_=planted.data.Validated")
CHECKPOINT = "callbacks=[model_checkpoint]"
DDP = ("strategy=ddp", "trainer.devices=[cpu,cpu]")

# The planted part, and the overrides that plant it.
PLANTED = {
    "slow_samples": ("waiting for data", ["+data.waiting=0.003"]),
    "decoded_samples": ("waiting for data", ["+data.computing=0.003"]),
    "slow_collate": ("waiting for data", ["+data.collating=0.02"]),
    "few_workers": ("waiting for data", ["+data.waiting=0.006", "data.num_workers=1"]),
    "short_epochs": ("waiting for data", ["+data.waiting=0.004", "+data.count=480"]),
    "hidden_workers": (
        "waiting for data",
        ["data._target_=planted.data.Hidden", "~data.num_workers", "+data.waiting=0.003"],
    ),
    "a_generator": ("waiting for data", ["data._target_=planted.data.Batches"]),
    "slow_callback": ("callback Slow", [f"+callbacks.slow={{_target_:{CALLBACKS}.Slow,every_n_steps:1}}"]),
    "rare_callback": (
        "callback Slow",
        [f"+callbacks.slow={{_target_:{CALLBACKS}.Slow,every_n_steps:8,seconds:0.2}}"],
    ),
    "many_values": (
        "loggers",
        ["+module.values=300", "trainer.log_every_n_steps=1", "logger.csv.flush_logs_every_n_steps=1"],
    ),
    "slow_bar": (
        "callback SlowProgressBar",
        [f"+callbacks.bar={{_target_:{CALLBACKS}.SlowProgressBar,refresh_rate:1}}", "trainer.enable_progress_bar=true"],
    ),
    "slow_hook": ("hooks of the module", ["+module.hook=0.02"]),
    "frequent_validation": ("validation", [*VALIDATED, "+module.validation=0.01", "trainer.val_check_interval=4"]),
    "validation_of_short_epochs": ("validation", [*VALIDATED, "+module.validation=0.05", "+data.count=192"]),
    "slow_validation_data": ("validation", [*VALIDATED, "+data.val_waiting=0.003", "trainer.val_check_interval=10"]),
    "frequent_checkpoints": (
        "checkpoints",
        [
            CHECKPOINT,
            "callbacks.model_checkpoint.every_n_train_steps=2",
            "+module.ballast=50000000",
            "trainer.enable_checkpointing=true",
        ],
    ),
    "slow_logger": (
        "loggers",
        [f"+logger.slow={{_target_:{CALLBACKS}.SlowLogger,save_dir:x}}", "trainer.log_every_n_steps=1"],
    ),
    "tiny_batches": (
        "short steps",
        ["+module.forward=0.0", "+data.batch_size=1", "+module.values=0", "~callbacks.memory_logger"],
    ),
    "a_slow_process": ("a slow process", [*DDP, "+module.per_sample=0.005"]),
    "large_exchange": ("exchange", [*DDP, "+module.parameters=8000000"]),
}
HEALTHY = {
    "plain": [],
    "with_workers": ["+data.waiting=0.001", "data.num_workers=2"],
    "with_validations": [*VALIDATED, "trainer.val_check_interval=50"],
    "with_checkpoints": [
        CHECKPOINT,
        "callbacks.model_checkpoint.every_n_train_steps=50",
        "trainer.enable_checkpointing=true",
    ],
    "logging": ["+module.values=20", "trainer.log_every_n_steps=10"],
    "a_quick_callback": [f"+callbacks.slow={{_target_:{CALLBACKS}.Slow,every_n_steps:1,seconds:0.001}}"],
    "accumulating": ["trainer.accumulate_grad_batches=4"],
    "reading_values": ["+module.reads=true"],
    "computing": ["+module.width=1500", "+data.batch_size=256", "+module.forward=0.0", "+data.count=40000"],
    "equal_processes": [*DDP],
}


def tune(overrides: list[str]) -> dict:
    """Return what `equipoise tune` says."""
    command = [sys.executable, "-m", "equipoise", "tune", "--json", f"--seconds={SECONDS}", *overrides]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])])}
    # Threads of a small network would compete with the workers.
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"limit": "error", "sentence": done.stderr.strip().splitlines()[-1], "rows": []}
    return json.loads(done.stdout)


def main(names: list[str]) -> None:
    right = improved = alarms = 0
    print(
        "| program | planted | named | sentence | speed with the proposal |\n| --- | --- | --- | --- | ---: |",
        flush=True,
    )
    for name, (part, overrides) in PLANTED.items():
        if names and name not in names:
            continue
        told = tune(overrides)
        better = [row for row in told["rows"] if row["is_improvement"]]
        chosen = [row for row in better if row["label"] in told["sentence"]]
        speed = "-"
        if not chosen:
            print({row["label"]: (row["speeds"], row["reason"]) for row in told["rows"]}, file=sys.stderr, flush=True)
        if chosen:
            speeds = sorted(chosen[0]["speeds"])
            speed = f"{speeds[len(speeds) // 2]:.2f}"
        right += told["limit"] == part
        improved += bool(chosen) and told["limit"] == part
        named = "yes" if told["limit"] == part else f"no: {told['limit']}"
        print(f"| {name} | {part} | {named} | {told['sentence']} | {speed} |", flush=True)
    for name, overrides in HEALTHY.items():
        if names and name not in names:
            continue
        told = tune(overrides)
        alarms += told["limit"] is not None
        print(f"| {name} | nothing | {told['limit'] or 'nothing'} | {told['sentence']} | - |", flush=True)
    print(f"\nNamed: {right} of {len(PLANTED)}; made faster: {improved}; false alarms: {alarms} of {len(HEALTHY)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
