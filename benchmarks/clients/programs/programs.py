"""The programs: which file of which checkout, its command line, and the arguments of its Trainer that are replaced."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Program:
    """A program of a public repository.

    Attributes:
        repository: The name of the checkout.
        commit: Its commit.
        file: The program in it.
        command: Its command line.
        arguments: Arguments of its Trainer that are replaced, beside the devices: they bound the run.
        stand_ins: Packages of which a part is replaced: see `run_program.stand_in`.
        hidden: Packages that Lightning's Trainer must not find beside it.
    """

    repository: str
    commit: str
    file: str
    command: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


LIGHTNING = ("pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")

PROGRAMS = {
    "hydra-template": Program(
        "lightning-hydra-template",
        "bddbc24b82ab6ccfa6243e815a49dc5bfe8d4144",
        "src/train.py",
        ("seed=12", "paths.data_dir=data", "paths.log_dir=logs", "logger=csv", "trainer.max_epochs=2"),
        {"limit_train_batches": 6, "limit_val_batches": 3, "limit_test_batches": 3},
    ),
    "gan": Program(
        *LIGHTNING,
        "examples/pytorch/domain_templates/generative_adversarial_net.py",
        (),
        {"max_epochs": 2, "limit_train_batches": 6},
    ),
    "q-network": Program(
        *LIGHTNING,
        "examples/pytorch/domain_templates/reinforce_learn_Qnet.py",
        ("--warm_start_steps", "300", "--episode_length", "64"),
        {"max_epochs": 5},
        stand_ins=("gym",),
    ),
    "ppo": Program(
        *LIGHTNING,
        "examples/pytorch/domain_templates/reinforce_learn_ppo.py",
        ("--steps_per_epoch", "256", "--batch_size", "64"),
        {"max_epochs": 2},
        stand_ins=("gym",),
    ),
    "graphs": Program(
        "pytorch_geometric",
        "5c6461b2305ad068a6d61165b3c55852a11aaa41",
        "examples/pytorch_lightning/gin.py",
        (),
        {"max_epochs": 2},
        # The data module would be one of `lightning`, the module is one of `pytorch_lightning`.
        hidden=("lightning",),
    ),
    "transformers": Program(
        "tutorials",
        "15817658a2d63afa338b9e1cd8454fb98d746fac",
        "lightning_examples/text-transformers/notebook.py",
        stand_ins=("datasets",),
    ),
}
