"""`equipoise compare`: what is measured of each strategy, and what the user sees of it."""

import csv
import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import Bench
from equipoise.extensions.comparison import command as command_module
from equipoise.extensions.comparison.measuring.candidates import CANDIDATES, chosen_candidates
from equipoise.extensions.comparison.measuring.largest import largest_that_runs
from equipoise.extensions.comparison.measuring.order import read_as_processes
from equipoise.extensions.comparison.measuring.trial import measure
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.strategies.distributed.loaders import share_loader
from equipoise.trainer.data.loaders import set_epoch
from tests.extensions.common.page.parsing import parse
from tests.support.pairs import pairwise
from tests.support.programs import EQUIPOISE, Program
from tests.support.projects import project_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance"),
]

# A model in the shape of BERT: its scores take more memory than its weights.
ROOT = Path(__file__).parents[3]
MASKED_WORDS = ROOT / "benchmarks" / "comparison" / "conf"
SMALL_WORDS = (
    *("module.vocabulary=1000", "data.vocabulary=1000", "module.length=16", "data.length=16"),
    *("module.width=16", "data.samples=64", "module.layers=1"),
)
SCORES = 16 * 16 * 1000 * 4
FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_, module: net, data: rows]
        trainer: {accelerator: cpu, max_epochs: 1}
        seed: 0
        """,
    "conf/module/net.yaml": "{_target_: little.module.Net, fails: null, most: null}",
    "conf/data/rows.yaml": "{_target_: little.module.Rows, batch_size: 8, ragged: false}",
    "little/__init__.py": "",
    "little/module.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch import nn
        from torch.utils.data import DataLoader

        class Net(LightningModule):
            def __init__(self, *, fails, most):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
                self.fails, self.most = fails, most

            def forward(self, rows):
                return self.net(rows)

            def training_step(self, batch, batch_idx):
                rows = batch
                if isinstance(batch, list):
                    rows = torch.stack([nn.functional.pad(row, (0, 16 - len(row))) for row in batch])
                if self.fails is not None and batch_idx >= self.fails:
                    raise RuntimeError("no [steps] today\\nbut tomorrow")
                if self.most is not None and len(rows) > self.most:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return self(rows).square().mean()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        class Rows(LightningDataModule):
            def __init__(self, *, batch_size, ragged):
                super().__init__()
                self.batch_size, self.ragged = batch_size, ragged

            def train_dataloader(self):
                rows = torch.rand(128, 16, generator=torch.Generator().manual_seed(0))
                collate = (lambda rows: [row[index:] for index, row in enumerate(rows)]) if self.ragged else None
                return DataLoader(rows, batch_size=self.batch_size, shuffle=True, collate_fn=collate)
        """,
}
WAITS_IN_A_TRIAL = """
    import os
    import threading

    def wait(module):
        with open("pid", "w") as pipe:
            pipe.write(str(os.getpid()))
        threading.Event().wait()

    Net.on_fit_start = wait
    """
DEVICES = "trainer.devices=[cpu,cpu]"


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "160")
    with project_in(tmp_path, FILES, "little", "masked_words", "digits") as folder:
        yield folder


@pytest.fixture
def compared(little: Path, equipoise: Any) -> Any:
    """A function that compares strategies on two devices, and returns what is told."""

    def compare(strategies: str, *arguments: str, steps: int = 1) -> dict[str, Any]:
        options = (f"--strategies={strategies}", f"--steps={steps}", "--json", DEVICES)
        code, out, err = equipoise("compare", *options, *arguments)
        assert code == 0, err
        result: dict[str, Any] = json.loads(out)
        return result

    return compare


# What is measured.


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_imbalance_of_gathered_scores(compared: Any) -> None:
    """Under gathered outputs the first device holds all scores, and their loss; elsewhere each device has its part."""
    # Measured shares would vary with what else runs on the machine.
    shares = ("strategy=balanced", "strategy.shares=[1,1]")
    result = compared("single_device,dp,balanced", "--config-dir", str(MASKED_WORDS), *shares, *SMALL_WORDS)
    rows = {row["strategy"]: row for row in result["rows"]}
    one, forward, step, balanced = (rows[name] for name in ("single_device", "dp forward", "dp step", "balanced"))
    (alone,) = one["peaks"].values()

    # 1. The scores, half of them on each device, and once more all of them on the first, with what the loss needs.
    first, second = forward["peaks"].values()
    assert first - second > 2 * SCORES
    assert first > 0.85 * alone
    assert forward["imbalance"] > 1.4

    # 2. Each device has the scores and the losses of its samples.
    for row in (step, balanced):
        assert max(row["peaks"].values()) < 0.75 * alone
        assert row["imbalance"] < 1.15

    # 3. The same weights, and the figures that follow.
    for row in (forward, step, balanced):
        assert row["distance"] < 1e-5
        assert row["samples_per_second"] > 0
        assert 0 <= row["idle"] < 1
    assert one["idle"] is None
    assert one["imbalance"] is None

    # 4. What was predicted. Gathered outputs are not.
    for row in (one, step, balanced):
        assert row["predicted_peaks"].keys() == row["peaks"].keys()
        for name, nbytes in row["peaks"].items():
            assert row["predicted_peaks"][name] == pytest.approx(nbytes, rel=0.02)
    assert "predicted_peaks" not in forward


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_stages_keep_what_is_theirs(compared: Any) -> None:
    """The parameters, gradients and states of a stage lie on its device, and all together are those of one device."""
    one, balanced, pipeline = compared("single_device,balanced,pipeline")["rows"]
    assert pipeline["reason"] is None
    (alone,) = one["peaks"].values()
    assert list(pipeline["peaks"]) == ["cpu (0)", "cpu (1)"]
    # Each linear layer has weights of 16 times 32, four times in all: itself, its gradient and two moments.
    assert min(pipeline["peaks"].values()) > 4 * 16 * 32 * 4
    assert max(pipeline["peaks"].values()) < 0.8 * alone
    assert pipeline["distance"] < 1e-5
    assert 0 < pipeline["idle"] < 1
    # It trains longer, as its shares settle; its weights are compared after as many steps.
    assert balanced["distance"] < 1e-5


@pytest.mark.slow
def test_virtual_devices_divide_the_batch(compared: Any) -> None:
    _, virtual = compared("single_device,virtual")["rows"]
    assert virtual["reason"] is None
    assert virtual["distance"] < 1e-2


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_table_the_csv_file_and_the_page(little: Path, equipoise: Any) -> None:
    code, out, err = equipoise(
        "compare", "--strategies=single_device,dp,ddp", "--steps=1", "--output=here", "data.batch_size=7", DEVICES
    )
    assert code == 0, err
    # 1. The output.
    assert "measuring dp step" in err
    assert "Net: steps of 7 samples on cpu (0), cpu (1)" in out
    assert "ddp did not run: data.batch_size=7 cannot be shared out evenly among 2 processes" in out
    assert "Recommended on this machine: " in out
    assert "There is no GPU among the devices." in out
    assert "Written: here/compare.html" in out

    # 2. The files, and nothing else.
    assert sorted(path.name for path in little.iterdir()) == ["conf", "here", "little"]
    assert sorted(path.name for path in (little / "here").iterdir()) == ["compare.csv", "compare.html"]
    with (little / "here" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == ["single_device", "dp forward", "dp step", "ddp"]
    assert rows[3]["reason"].startswith("data.batch_size=7")
    assert int(rows[1]["peak of cpu (1)"]) > 0
    assert rows[0]["peak of cpu (1)"] == ""
    # A bar for each device that was measured and for each rate; a stroke for each device that was predicted.
    page = parse((little / "here" / "compare.html").read_text())
    assert len(page.all("g", "bar")) == (1 + 2 + 2) + 3
    assert len(page.all("line", "expected")) == 1 + 2


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_largest_batch_of_each_strategy(compared: Any) -> None:
    one, step = compared("single_device,dp step", "--largest=32", "module.most=12")["rows"]
    assert (one["largest_batch"], one["largest_batch_is_bound"]) == (12, False)
    assert (step["largest_batch"], step["largest_batch_is_bound"]) == (24, False)
    # The weights that are compared are those of the configured batch.
    assert step["distance"] < 1e-5


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_one_device_may_be_too_small(compared: Any) -> None:
    """A training that does not fit on one device may fit on two: the comparison shows it."""
    one, step = compared("single_device,dp step", "module.most=4")["rows"]
    assert "out of memory" in one["reason"]
    assert step["samples_per_second"] > 0
    assert step["distance"] is None


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_options_of_the_configured_strategy_are_kept(compared: Any) -> None:
    (row,) = compared("balanced", "strategy=balanced", "strategy.shares=[1,7]")["rows"]
    assert row["imbalance"] > 1.01
    assert row["overrides"] == ["strategy=balanced", "strategy.shares=[1,7]"]


# Wrong input, failures and interrupts.


@pytest.mark.few_cases(6)
@pytest.mark.usefixtures("without_processes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trainer.devices=[cuda:7]",), "cuda:7 is no cpu device"),
        (("trainer.devices=[cuda:7]", "trainer.accelerator=auto"), "cuda:7 does not exist"),
        (("trainer.devices=[tpu]",), "a device is given as"),
        (("--strategies=dpp", DEVICES), "There is no strategy 'dpp' to compare; did you mean 'dp'?"),
        (("--strategies=ensemble", DEVICES), "cannot compare ensemble"),
        (("--strategies=",), "--strategies takes names"),
        (("--steps=0",), "--steps takes a whole number from 1"),
        (("--timeout=x",), "--timeout takes seconds above 0"),
        (("--json=1",), "--json takes no value"),
        (("--multirun",), "--output=FOLDER and --json, not --multirun."),
        (("module.fails=0", DEVICES), "there is nothing to compare: RuntimeError: no [steps] today"),
        (("--largest", "data.batch_size='8'"), "--largest changes data.batch_size"),
        (("--largest", DEVICES), "give a bound, such as --largest=512"),
        (("--output=", DEVICES), "--output takes a folder"),
        (("--output=conf/config.yaml/here", DEVICES), "conf/config.yaml' is a file"),
        (("trainer.num_nodes=2",), "this machine alone"),
    ],
)
def test_arguments_that_are_refused(little: Path, equipoise: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = equipoise("compare", *arguments)
    assert (code, out) == (2, "")
    shown = ("equipoise: predicting", "equipoise: measuring", "Seed set")
    lines = [line for line in err.splitlines() if not line.startswith(shown)]
    assert message in "\n".join(lines)
    assert sum(line.startswith("equipoise: ") for line in lines) == 1
    assert sorted(path.name for path in little.iterdir() if path.name != "here") == ["conf", "little"]


@pytest.mark.usefixtures("without_processes")
def test_a_batch_that_cannot_be_split_is_a_row(compared: Any) -> None:
    """Nothing is predicted of it, and one device is measured all the same."""
    result = compared("single_device,dp step", "data.ragged=true")
    assert [note for note in result["notes"] if note.startswith("Peaks are not predicted: ")]
    one, step = result["rows"]
    assert one["state"] == "done"
    assert one["peaks"]["cpu"] > 0
    assert "predicted_peaks" not in one
    assert step["reason"].startswith("StepError: ")
    assert "batch_size(self, batch)" in step["reason"]


@pytest.mark.usefixtures("without_processes")
def test_one_device_is_told_what_is_missing(little: Path, equipoise: Any) -> None:
    code, out, err = equipoise("compare", "--strategies=single_device,ddp", "--steps=1", "--json")
    assert code == 0, err
    assert "name several, such as trainer.devices=[cpu,cpu]" in json.loads(out)["rows"][1]["reason"]


@pytest.mark.usefixtures("without_processes")
def test_an_interrupted_search_keeps_what_is_measured(
    little: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Bench.run

    def interrupted(bench: Bench, function: Any, *arguments: Any) -> Any:
        if function is measure and arguments[0].values["data"]["batch_size"] > 8:
            raise KeyboardInterrupt
        return run(bench, function, *arguments)

    monkeypatch.setattr(Bench, "run", interrupted)
    arguments = ("--strategies=single_device,dp step", "--steps=1", "--largest=64", "--json", DEVICES)
    code, out, _ = equipoise("compare", *arguments)
    assert code == 130
    result = json.loads(out)
    assert result["outcome"] == "interrupted"
    one, step = result["rows"]
    assert (one["state"], step["state"]) == ("done", "not run")
    assert step["reason"] == "the comparison was interrupted"
    assert one["samples_per_second"] > 0
    assert one["largest_batch"] is None


@pytest.mark.slow
def test_results_that_cannot_be_written_are_printed(
    little: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full when the measurements are done."""

    def full(page: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    measured = {"peaks": {"cpu": 5}, "seconds": 1.0, "samples_per_second": 8.0}
    monkeypatch.setattr(Bench, "run", lambda *_: dict(measured))
    monkeypatch.setattr(command_module, "write_page", full)
    code, out, err = equipoise("compare", "--strategies=single_device", "--json", DEVICES)
    assert code == 2
    assert "No space left on device" in err
    assert json.loads(out)["rows"][0]["peaks"] == {"cpu": 5}


def test_one_of_several_processes_is_refused(little: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    code, out, err = equipoise("compare", DEVICES)
    assert (code, out) == (2, "")
    assert "but this is one of 2" in err


# Processes.


@pytest.mark.slow
def test_processes_of_ddp_and_fsdp_tell_their_figures(compared: Any) -> None:
    """Each device of ddp and fsdp has a process, whose figures all arrive."""
    one, ddp, fsdp = compared("single_device,ddp,fsdp", steps=2)["rows"]
    # The rows are shuffled, and each step has the same ones under every strategy.
    assert ddp["reason"] is None
    assert fsdp["reason"] is None
    assert list(ddp["peaks"]) == ["cpu (0)", "cpu (1)"]
    assert ddp["distance"] < 1e-5
    assert fsdp["distance"] < 1e-5
    assert ddp["overrides"] == ["strategy=ddp", "data.batch_size=4"]
    assert 0 <= ddp["idle"] <= 1
    assert one["distance"] is None


@pytest.mark.slow
def test_an_interrupt_leaves_no_process(little: Path) -> None:
    """The interrupt comes while the first trial runs."""
    module = little / "little" / "module.py"
    module.write_text(module.read_text() + textwrap.dedent(WAITS_IN_A_TRIAL))
    os.mkfifo(little / "pid")
    with Program(EQUIPOISE, "compare", DEVICES, "--json", folder=little, starts_workers=True) as program:
        with (little / "pid").open() as pipe:
            trial = psutil.Process(int(pipe.read()))
        program.send_signal(signal.SIGINT)
        out, _ = program.finish()
        assert program.returncode == 130
    assert out == ""
    # Whoever inherits the process that was killed removes it a moment later.
    trial.wait(60)


# Parts.


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epoch", [0, 3])
def test_one_process_reads_what_several_share_out(shuffle: bool, epoch: int) -> None:
    class Data:
        def train_dataloader(self) -> DataLoader:
            return DataLoader(range(23), batch_size=6, shuffle=shuffle)

    # 1. The steps of three processes.
    parts = []
    for rank in range(3):
        part = share_loader(
            DataLoader(range(23), batch_size=2, shuffle=shuffle), rank, 3, seed_of_order(), training=True
        )
        set_epoch(part, epoch)
        parts.append(list(part))
    shared = [sorted(number for batch in step for number in batch.tolist()) for step in zip(*parts, strict=True)]

    # 2. Those of one.
    data = Data()
    read_as_processes(data)
    loader = data.train_dataloader()
    set_epoch(loader, epoch)
    assert [sorted(batch.tolist()) for batch in loader] == shared
    assert (shared[0] == list(range(6))) == (not shuffle)


def test_other_loaders_keep_their_order() -> None:
    class Data:
        def train_dataloader(self) -> Any:
            return loaders

    loaders: Any = [DataLoader(range(4), shuffle=True)]
    data = Data()
    read_as_processes(data)
    assert data.train_dataloader() is loaders
    loaders = DataLoader(range(4), batch_sampler=[[3, 1], [0, 2]])
    assert data.train_dataloader() is loaders
    read_as_processes(object())


@pytest.mark.parametrize(("limit", "multiple", "start"), pairwise([0, 1, 7, 31, 33, 999, 2000], [1, 2, 3], [6, 30]))
def test_the_search_finds_the_limit(limit: int, multiple: int, start: int) -> None:
    tried = []

    def runs(size: int) -> bool:
        tried.append(size)
        return size <= limit

    known = start if start <= limit else 0
    failed = None if known else start
    size, is_bound = largest_that_runs(runs, known, failed, 1000, multiple)
    best = min(limit, 1000)
    assert (size or 0) <= best
    assert best - (size or 0) <= max(2 * multiple, best // 15 + multiple)
    assert is_bound == (limit >= 1000 - 1000 % multiple)
    assert len(set(tried)) == len(tried) < 20
    assert all(size % multiple == 0 for size in tried)


def test_candidates_are_chosen_by_their_names() -> None:
    assert [candidate.label for candidate in chosen_candidates(None)][:3] == ["single_device", "dp forward", "dp step"]
    assert [candidate.label for candidate in chosen_candidates(["dp"])] == ["dp forward", "dp step"]
    with pytest.raises(ConfigurationError, match="did you mean 'pipeline'"):
        chosen_candidates(["pipelin"])
    values = {"trainer": {"devices": 2}, "strategy": "auto", "data": {"batch_size": 8}}
    before = json.dumps(values)
    for candidate in CANDIDATES:
        candidate.attempt(values, ["cpu", "cpu"])
    assert json.dumps(values) == before


def test_nothing_is_predicted_if_nothing_runs(little: Path, equipoise: Any) -> None:
    code, out, err = equipoise("compare", "trainer.devices=1", "--strategies=dp", "--json")
    assert code == 0, err
    assert not [note for note in json.loads(out)["notes"] if "predicted" in note]


@pytest.mark.thorough
def test_a_search_is_no_batch_size(little: Path, equipoise: Any) -> None:
    for command in ("compare", "plan"):
        code, _, err = equipoise(command, "data.batch_size=auto")
        assert code == 2
        assert f"Give equipoise {command} a number" in err
