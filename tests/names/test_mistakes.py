"""A mistake in a script ends in one sentence with the way out, below the script's own lines alone."""

import pickle
import runpy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import equipoise
from equipoise.names.misfits import refuse_misfits
from tests.support.trainer_runs import trainer

DATA = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
FOLDER = f"{equipoise.__path__[0]}/"


class Net(equipoise.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return nn.functional.cross_entropy(self.layer(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


NAMES = {
    "equipoise": equipoise,
    "Trainer": equipoise.Trainer,
    "DataModule": equipoise.LightningDataModule,
    "Net": Net,
    "DATA": DATA,
    "torch": torch,
    "trainer": trainer,
    "loader": DataLoader(DATA, batch_size=4),
}

# What the error says, and what a script does.
MISTAKES = {
    # Arguments.
    "did you mean 'find_unused_parameters'?": "equipoise.DDPStrategy(find_unused_params=True)",
    "OOMRecovery takes no argument 'max_part'; there are: policy,": "equipoise.OOMRecovery(max_part=3)",
    "EnsembleStrategy does not take 3 without a name: write NAME=3; there are: members,": (
        "equipoise.EnsembleStrategy(3)"
    ),
    "Trainer does not take 10 without a name: write NAME=10; there are: accelerator,": "Trainer(10)",
    "DDPStrategy takes no argument 'num_nodes'; did you mean `Trainer(num_nodes=...)`?": (
        "equipoise.DDPStrategy(num_nodes=2)"
    ),
    "Trainer.fit takes no argument 'epochs'; did you mean `Trainer(max_epochs=...)`?": (
        "trainer().fit(Net(), loader, epochs=3)"
    ),
    "did you mean 'train_dataloaders'?": "trainer().fit(Net(), train_dataloader=loader)",
    "Trainer.fit: multiple values for argument 'model'.": "trainer().fit(Net(), model=Net())",
    "DataParallelStrategy takes no devices: give them to the trainer, as in Trainer(devices=['cuda:0'],": (
        "equipoise.DataParallelStrategy(['cuda:0'])"
    ),
    "'auto_lr_find'; did you mean the callback LearningRateFinder of lightning.pytorch.callbacks?": (
        "Trainer(auto_lr_find=True)"
    ),
    "predict_memory: missing a required argument: 'module'.": "equipoise.predict_memory()",
    "max_epochs must be an integer": "Trainer(max_epochs='10')",
    "Trainer takes no module: it is the first argument of `fit`, as in Trainer(...).fit(module,": "Trainer(Net())",
    "Trainer takes no argument 'batch_size'; did you mean `DataLoader(batch_size=...)`?": "Trainer(batch_size=32)",
    "Trainer takes no argument 'learning_rate'; did you mean `configure_optimizers` of the module?": (
        "Trainer(learning_rate=0.1)"
    ),
    "Trainer takes no argument 'train_dataloader'; did you mean `fit(train_dataloaders=...)`?": (
        "Trainer(train_dataloader=loader)"
    ),
    "A checkpoint holds a module, but no run has brought one yet.": "trainer().save_checkpoint('a.ckpt')",
    "not the class DDPStrategy: pass an object, DDPStrategy(...).": ("trainer(strategy=equipoise.DDPStrategy)"),
    "datamodule must be an object of LightningDataModule, not <class": "trainer().fit(Net(), datamodule=DataModule)",
    # Names.
    "cannot import name 'ModelCheckpoint' from 'equipoise'; it is Lightning's: from lightning.pytorch.callbacks import"
    " ModelCheckpoint": "from equipoise import ModelCheckpoint",
    "did you mean 'EarlyStopping' of lightning.pytorch.callbacks?": "from equipoise import EarlyStoping",
    "'Trainer' object has no attribute 'train'; did you mean 'fit'?": "trainer().train(Net(), loader)",
    "'Trainer' object has no attribute 'lr_find'; did you mean the callback LearningRateFinder": "trainer().lr_find",
    # Hooks.
    "`Data.setup` is called with (stage), but is defined as `()`. Take `(self, stage)`.": """
class Data(DataModule):
    def setup(self):
        pass

    def train_dataloader(self):
        return loader

trainer().fit(Net(), datamodule=Data())
""",
    "does not define `training_step`. Rename `train_step`.": """
class Steps(equipoise.LightningModule):
    @property
    def not_yet(self):
        raise ValueError("it is asked for too early")

    def train_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        pass

trainer().fit(Steps(), loader)
""",
    "Assigns.train_dataloader is a method, but was set to DataLoader.": """
class Assigns(DataModule):
    def __init__(self):
        super().__init__()
        self.train_dataloader = loader

trainer().fit(Net(), datamodule=Assigns())
""",
    # Steps.
    "it must have a single element. Try `.mean()`.": """
class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("scores", self.layer(batch[0]))

trainer().fit(Logs(), loader)
""",
    "The batch is of shape [4], torch.float32: each item that a loader gives is a batch.": (
        "trainer().fit(Net(), torch.zeros(8, 4))"
    ),
    "set `self.automatic_optimization = False`.": """
class Twice(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss

trainer().fit(Twice(), loader)
""",
    "The loss is not connected to any parameter": """
class Detached(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()

trainer().fit(Detached(), loader)
""",
    "`validate` was called within a run of the same trainer. Call it": """
class Nested(Net):
    def on_train_epoch_end(self):
        self.trainer.validate(self, loader)

trainer().fit(Nested(), loader)
""",
    # An error of a library.
    "Did you mean 'val_loss'?": """
from lightning.pytorch.callbacks import ModelCheckpoint

class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

settings = {"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0, "enable_checkpointing": True}
trainer(**settings, callbacks=[ModelCheckpoint(monitor="loss")]).fit(Validated(), loader, loader)
""",
    "A data set defines `__len__`. One without a length derives from IterableDataset.": """
class Endless(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.zeros(4), 0

trainer().fit(Net(), torch.utils.data.DataLoader(Endless(), batch_size=2))
""",
    "Samples of different shapes cannot be stacked to a batch": (
        "trainer().fit(Net(), torch.utils.data.DataLoader([torch.zeros(2), torch.zeros(3)], batch_size=2))"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.quick_cases(8)
@pytest.mark.few_cases(3)
@pytest.mark.parametrize(("message", "script"), MISTAKES.items(), ids=list(MISTAKES))
def test_one_sentence_below_the_lines_of_the_script(message: str, script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    with pytest.raises(Exception, match=r".") as caught:
        runpy.run_path(str(path), NAMES)
    text = "".join(traceback.format_exception(caught.value))
    assert message in text.splitlines()[-1] or any(message in note for note in getattr(caught.value, "__notes__", []))
    assert f'File "{path}", line' in text
    assert FOLDER not in text


def test_an_argument_that_lacks_is_told_where_others_are_given_by_position() -> None:
    def mean(values: Any, weights: Any) -> None: ...

    with pytest.raises(TypeError, match=r"mean: missing a required argument: 'weights'\.$"):
        refuse_misfits(mean, [1], {})


def test_modules_can_be_imported() -> None:
    from equipoise import callbacks, errors

    assert callbacks.Callback is equipoise.Callback
    assert errors.ConfigurationError is equipoise.ConfigurationError


def test_a_decorated_function_is_the_one_of_its_module() -> None:
    assert pickle.loads(pickle.dumps(equipoise.predict_memory)) is equipoise.predict_memory
