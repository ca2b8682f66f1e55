"""A mistake in a configuration is one message with the way out, exit code 2, no traceback, before any training."""

import os

import pytest

from equipoise.names.tracebacks import FULL
from equipoise.parallel.workers import availability
from tests.support.projects import write

MISTAKES = [
    # keys
    ("fit trainer.max_epoch=3", "no key 'trainer.max_epoch'", "did you mean 'trainer.max_epochs'?"),
    ("fit callback=[timer]", "no key 'callback'", "did you mean 'callbacks'?"),
    ("fit +modul.x=1", "no key 'modul'", "did you mean 'module'?"),
    ("fit module.lrr=3", "no key 'module.lrr'", "did you mean 'module.lr'?"),
    ("fit module.zzz=3", "no key 'module.zzz'", "there are: lr, settings, sizes."),
    ("fit +module.lrr=3", "module.lrr is not an argument of Line", "did you mean 'module.lr'?"),
    ("fit hydra.run.dirr=3", "no key 'hydra.run.dirr'", "did you mean 'hydra.run.dir'?"),
    ("fit ~modul", "no key 'modul'", "did you mean 'module'?"),
    ("fit trainer.strategy=ddp", "'trainer.strategy' is not a key of the trainer", "strategy=NAME"),
    (
        "fit strategy.foo=1",
        "no key 'strategy.foo'",
        "there are: auto, balanced, ddp, dp, ensemble, fsdp, hogwild, pipeline, single_device, virtual",
    ),
    ("fit experiment=typo", "In experiment/typo.yaml", "did you mean 'trainer.max_epochs'?"),
    # groups and options
    ("fit strategy=single_devise", "no 'single_devise' in the group 'strategy'", "did you mean 'single_device'?"),
    ("fit strategy=DDP", "no 'DDP' in the group 'strategy'", "did you mean 'ddp'?"),
    ("fit logger=false", "no false in the group 'logger'", "did you mean 'none'?"),
    ("fit callbacks.early_stopping.patience=3", "not part of the configuration", "callbacks=[early_stopping]"),
    ("fit module=wide module.width=3", "but tiny.wide.Wide takes it", "add it by +module.width=VALUE"),
    ("fit module.learning_rate=3", "no key 'module.learning_rate'", "did you mean 'module.lr'?"),
    ("fit optimizer.lr=3", "no key 'optimizer'", "`configure_optimizers` of the module makes optimisers"),
    ("fit precision=17", "no 17 in the group 'precision'", "16-mixed, 16-true"),
    ("fit strategy=deepspeed", "strategy='deepspeed' is not supported", "strategy='fsdp'"),
    ("fit data=null", "no null in the group 'data'", "~data leaves the group out"),
    ("fit data=mnist", "no 'mnist' in the group 'data'", "A file conf/data/mnist.yaml adds one."),
    ("fit trainer=gpu", "no 'gpu' in the group 'trainer'", "as in trainer.KEY=VALUE"),
    ("fit hydra/launcher=submitit_slurm", "no 'submitit_slurm'", "pip install hydra-submitit-launcher"),
    ("fit experiment=group", "no group 'modul' to override", "did you mean 'module'?"),
    # values
    ("fit trainer.max_epochs=many", "trainer.max_epochs: Value 'many'", "Integer"),
    ("fit trainer.max_epochs=-7", "max_epochs", "\nIn the configuration: trainer.max_epochs=-7."),
    ("fit trainer.limit_train_batches=few", "limit_train_batches must be of type int | float", "it is 'few'"),
    ("fit trainer.accelerator=cuda:1", "names one device", "give devices=['cuda:1']"),
    ("fit module.lr=[1,2]", "it is [1, 2]", "--multirun module.lr=1,2"),
    ("fit callbacks=[early_stopping]", "callbacks.early_stopping.monitor must be given a value", "=VALUE"),
    ("fit callbacks=[timer] callbacks.timer.interval=year", "interval=year", "epoch"),
    ("fit module.lr=abc", "module.lr must be of type float, as Line annotates it", "it is 'abc'"),
    ("fit module.lr=null", "it is null", "annotate it as float | None"),
    ("fit module.sizes=3", "module.sizes must be of type list", "it is 3"),
    ("fit data.count=4.5", "data.count must be of type int, as Points annotates it", "it is 4.5"),
    ("fit +module.x={_target_:tiny.data.Points,count:many}", "module.x.count must be of type int", "it is 'many'"),
    ("fit +trainer.logger=false", "'trainer.logger' is not a key of the trainer", "logger=[NAME]"),
    ("fit objective=3", "objective must be the name of a logged value", "it is 3"),
    ("fit seed=once", "seed must be a whole number from 0", "'once'"),
    ("fit seed=-1", "seed must be a whole number from 0 to 4294967295", "it is -1"),
    ("fit hydra.run.dir=conf/config.yaml/run", "The folder of the run cannot be made", "hydra.run.dir=FOLDER"),
    ("fit -m hydra.sweep.dir=conf/config.yaml/x module.lr=1,2", "cannot be made", "hydra.sweep.dir=FOLDER"),
    ("fit output_dir=conf/config.yaml/run", "The folder of the run cannot be made", "output_dir=FOLDER"),
    ("fit test=perhaps", "test must be true or false", "'perhaps'"),
    ("fit module.lr=${nope}", "module.lr: Interpolation key 'nope' not found", ""),
    ("fit trainer.max_epochs=1,2", "trainer.max_epochs=1,2", "--multirun"),
    ("fit trainer.max_epochs = 3", "Cannot read 'trainer.max_epochs'", "key=value without spaces"),
    ("fit trainer.devices=[cpu, cpu]", "Cannot read 'trainer.devices=[cpu,'", "the whole argument in quotes"),
    ("fit conf/experiment/short.yaml", "Cannot read", "as experiment=short"),
    ("fit help", "Cannot read 'help'", "did you mean --help?"),
    ("fit experiment=torn", "torn.yaml, line 4", "expected"),
    ("fit experiment=tabs", "tabs.yaml, line 3", "Indent with spaces."),
    # targets
    ("fit module._target_=tiny.modul.Line", "tiny has no 'modul'", "did you mean 'module'?"),
    ("fit module._target_=tiny.module.Lime", "tiny.module has no 'Lime'", "did you mean 'Line'?"),
    ("fit module._target_=tine.module.Line", "there is no module 'tine'", "neither installed nor beside"),
    (
        "fit module._target_=tiny.broken.Line",
        "tiny.broken failed with: No module named 'not_installed'",
        "pip install not_installed",
    ),
    ("fit module._target_=tiny.__name__", "must be a class or a function", "'tiny'"),
    ("fit module._target_=tiny/module.py:Line", "cannot be imported", "as Python imports it, tiny.module.Line."),
    ("fit module._target_=Line", "cannot be imported", "did you mean 'tiny.module.Line'?"),
    ("fit module._target_=tiny.unfinished.Line", "unfinished.py, line 1", "class Line"),
    ("fit +module.x={_target_:fractions.Fraction,numer:1}", "module.x.numer is not an argument", "numerator"),
    ("fit ~module.lr", "Line needs lr", "module.lr=VALUE"),
    ("fit ~module", "There is no module", "module=NAME"),
    ("fit ~data", "There are no data", "train_dataloader"),
    (
        "fit callbacks=[] +callbacks.model_checkpoint.monitor=val_loss",
        "callbacks.model_checkpoint must say what to build",
        "if model_checkpoint is an option of the group, name it as well",
    ),
    ("fit ~module._target_", "module must say what to build", "_target_"),
    # runs
    ("test ckpt_path=best", "no earlier run of this module left a checkpoint", "Give a path"),
    ("fit ckpt_path=nowhere.ckpt", "The checkpoint 'nowhere.ckpt' does not exist", ""),
    ("test ckpt_path=conf", "The checkpoint 'conf' is a folder", "not a file in it"),
    # the command line itself
    ("fit max_epochs=3", "no key 'max_epochs'", "did you mean 'trainer.max_epochs'?"),
    ("fit lr=0.5", "no key 'lr'", "did you mean 'module.lr'?"),
    ("fit epochs=3", "no key 'epochs'", "did you mean 'trainer.max_epochs'?"),
    ("fit model.lr=0.5", "no key 'model'", "did you mean 'module'?"),
    ("fit fp16=true", "no key 'fp16'", "did you mean 'precision=16-mixed'?"),
    ("fit resume=last", "no key 'resume'", "did you mean 'ckpt_path'?"),
    ("fit trainer.gpus=2", "no key 'trainer.gpus'", "did you mean 'trainer.devices'?"),
    ("fit +trainer.gpus=2", "not an argument of Trainer", "did you mean 'trainer.devices'?"),
    ("fit trainer.auto_lr_find=true", "no key", "did you mean 'callbacks=[learning_rate_finder]'?"),
    ("fit trainer.zzz=3", "no key 'trainer.zzz'", "`equipoise fit --help trainer` explains"),
    ("fit precision=fp16", "no 'fp16' in the group 'precision'", "did you mean '16-mixed'?"),
    ("fit callbacks=[ema]", "no 'ema' in the group 'callbacks'", "did you mean 'ema_weight_averaging'?"),
    ("fit callbacks=[unpackaged]", "callbacks._target_ must say", "begin with the line `# @package callbacks.NAME`"),
    ("fit experiment=unpackaged", "the first line is missing", "`# @package _global_`"),
    ("fit experiment=unpackaged_keys", "sets keys below 'experiment'", "begin with the line `# @package _global_`"),
    ("fit --config-name without_base", "callbacks is overridden", "put equipoise first in the defaults list"),
    ("fit --config-name self", "names '_self'", "did you mean '_self_'?"),
    ("fit --config-name early", "move `override callbacks` below the groups that follow", ""),
    ("fit +data.count=4", "has the key 'data.count'", "write data.count=4, without a plus"),
    ("fit +data=points", "data is chosen twice", "write data=NAME, without a plus"),
    ("fit module.lr=1e-3,1e-4", "gives several values", "--multirun runs each of them, module.lr=[1e-3,1e-4]"),
    ("train", "no command 'train'", "did you mean 'fit'?"),
    ("fit --epochs=3", "no flag '--epochs'", "as trainer.max_epochs=3"),
    ("fit --lr 0.1", "no flag '--lr'", "as module.lr=VALUE"),
    ("fit --fp16", "no flag '--fp16'", "as precision=16-mixed"),
    ("fit callbacks=[early_stopping] callbacks.early_stopping.monitor=val_los", "monitors 'val_los'", "'val_loss'?"),
    ("fit --batch-size 32", "no flag '--batch-size'", "as data.batch_size=VALUE"),
    ("fit -e short", "no flag '-e'", "did you mean"),
    ("fit -max_epochs=3", "no flag '-max_epochs'", "as trainer.max_epochs=3"),
    ("fit --debug=1", "--debug takes no value", ""),
    ("--multirun fit module.lr=1,2", "Flags follow the command", "equipoise fit --multirun"),
    ("plan --timeout 5", "--timeout takes seconds above 0, such as --timeout=300.", ""),
    ("fti", "no command 'fti'", "did you mean 'fit'?"),
    ("fit --multi", "no flag '--multi'", "did you mean '--multirun'?"),
    ("fit --trainer.max_epochs=3", "no flag '--trainer.max_epochs'", "as trainer.max_epochs=3"),
    ("fit --config-dir nowhere", "no folder 'nowhere'", "--config-dir"),
    ("fit --config-dir", "must be followed by a folder", ""),
    ("fit --config-dir= trainer.max_epochs=1", "must be followed by a folder", ""),
    ("fit stage=test", "equipoise test, not equipoise fit stage=test", ""),
    ("devices cuda", "takes no arguments", "cuda"),
    ("init", "takes one folder", "nothing"),
    ("init a b", "takes one folder", "a b"),
    ("completion", "bash, zsh, fish", "nothing"),
    ("completion tcsh", "bash, zsh, fish", "tcsh"),
]


@pytest.mark.quick_cases(27)
@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("line", "what", "way_out"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_one_message(project, equipoise, line, what, way_out):
    write(
        project,
        {
            "conf/experiment/typo.yaml": "# @package _global_\ntrainer: {max_epoch: 3}\n",
            "conf/experiment/group.yaml": "# @package _global_\ndefaults: [override /modul: line]\n",
            "conf/experiment/unpackaged.yaml": "defaults: [override /callbacks: [model_checkpoint]]\n",
            "conf/experiment/unpackaged_keys.yaml": "seed: 1\n",
            "conf/callbacks/unpackaged.yaml": "_target_: lightning.pytorch.callbacks.Timer\n",
            "conf/without_base.yaml": "defaults: [override callbacks: [model_checkpoint]]\n",
            "conf/early.yaml": "defaults: [equipoise, _self_, override callbacks: [timer], module: line]\n",
            "conf/self.yaml": "defaults: [equipoise, _self, module: line, data: points]\n",
            "conf/experiment/torn.yaml": "# @package _global_\ntrainer: {\n  max_epochs: 3\n",
            "conf/experiment/tabs.yaml": "# @package _global_\ntrainer:\n\tmax_epochs: 3\n",
            "tiny/broken.py": "import not_installed\n",
            "tiny/unfinished.py": "class Line\n",
            "tiny/wide.py": """
                from tiny.module import Line

                class Wide(Line):
                    def __init__(self, *, width=2, **options):
                        super().__init__(**options)
                """,
            "conf/module/wide.yaml": """
                defaults: [line]
                _target_: tiny.wide.Wide
                """,
        },
    )
    code, _, err = equipoise(*line.split())
    assert code == 2
    assert what in err
    assert way_out in err
    assert err.startswith("equipoise: ")
    assert "Traceback" not in err
    assert not list(project.glob("outputs/*/*/checkpoints"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line",
    [
        "fit ckpt_path=nowhere.ckpt seed=0",
        "fit +modul.x=1",
        "fit hydra.run.dir=here/there module._target_=tiny.module.Lime",
    ],
)
def test_what_is_refused_leaves_no_folder(project, equipoise, line):
    before = sorted(path.name for path in project.iterdir() if path.name != "tiny")
    assert equipoise(*line.split())[0] == 2
    assert sorted(path.name for path in project.iterdir() if path.name != "tiny") == before


@pytest.mark.thorough
def test_what_is_refused_leaves_what_was_in_its_folder(project, equipoise):
    (project / "here").mkdir()
    (project / "here" / "mine.txt").touch()
    assert equipoise("fit", "hydra.run.dir=here", "ckpt_path=nowhere.ckpt")[0] == 2
    assert [path.name for path in (project / "here").iterdir()] == ["mine.txt"]


@pytest.mark.thorough
def test_what_is_refused_never_removes_the_folder_where_it_stands(project, equipoise, monkeypatch):
    (project / "empty").mkdir()
    monkeypatch.chdir(project / "empty")
    arguments = ("--config-dir", str(project / "conf"), "ckpt_path=nowhere.ckpt")
    assert equipoise("fit", *arguments)[0] == 2
    assert equipoise("fit", *arguments, "hydra.run.dir=.")[0] == 2
    assert not list((project / "empty").iterdir())


@pytest.mark.parametrize("switch", ["--debug", "HYDRA_FULL_ERROR"])
def test_debug_and_hydras_own_switch_show_the_traceback(project, equipoise, monkeypatch, switch):
    flags = ["--debug"] if switch == "--debug" else []
    if not flags:
        monkeypatch.setenv(switch, "1")
    with pytest.raises(ValueError, match=r"did you mean 'trainer\.max_epochs'"):
        equipoise("fit", "trainer.max_epoch=3", *flags)
    # Later runs of this process show short tracebacks again.
    assert FULL not in os.environ


@pytest.mark.thorough
def test_a_folder_without_a_primary_configuration(project, equipoise):
    (project / "conf" / "config.yaml").unlink()
    code, _, err = equipoise("fit")
    assert code == 2
    assert "No module is chosen: give module=NAME; there are: line." in err
    assert equipoise("fit", "module=line", "data=points", "trainer.fast_dev_run=true")[0] == 0


@pytest.mark.thorough
def test_a_configuration_without_ours(project, equipoise):
    write(project, {"conf/config.yaml": "defaults: [_self_, module: line]\nseed: 1\n"})
    code, _, err = equipoise("fit")
    assert code == 2
    assert "no trainer, strategy, callbacks, logger" in err
    assert "put equipoise first in its defaults list" in err


@pytest.mark.thorough
@pytest.mark.parametrize("callbacks", ["[1]", "{x: 1}"])
def test_callbacks_that_are_no_mapping_to_targets(project, equipoise, callbacks):
    write(project, {"conf/experiment/listed.yaml": f"# @package _global_\ncallbacks: {callbacks}\n"})
    code, _, err = equipoise("fit", "experiment=listed")
    assert code == 2
    assert "callbacks" in err
    assert "to build" in err


@pytest.mark.thorough
def test_callbacks_may_be_left_out(project, equipoise):
    write(project, {"conf/experiment/quiet.yaml": "# @package _global_\ncallbacks: {run_summary: null}\n"})
    code, out, _ = equipoise("fit", "experiment=quiet")
    assert code == 0
    assert "Fit finished" not in out


@pytest.mark.whole_package
@pytest.mark.parametrize(
    ("command", "feature"),
    [
        ("plan", "equipoise plan"),
        ("savings", "equipoise savings"),
        ("compare", "equipoise compare"),
        ("fit +data.batch_size=auto", "data.batch_size=auto"),
    ],
)
def test_what_needs_processes_is_refused_where_none_can_be_started(project, equipoise, monkeypatch, command, feature):
    monkeypatch.setattr(availability, "get_all_start_methods", lambda: ["spawn"])
    code, out, err = equipoise(*command.split())
    assert code == 2
    assert not out
    assert err.startswith(f"equipoise: {feature} needs a fork server, and POSIX signals between processes, but")
    assert err.endswith("WSL 2 on Windows.\n")
    assert not (project / "outputs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("+foo.bar=1", "nothing reads the key 'foo.bar', which the command line adds"),
        ("+lines.lr=0.3", "did you mean 'module.lr'?"),
        ("+my.count=2", "did you mean 'data.count'?"),
    ],
)
def test_a_key_that_nothing_reads(project, equipoise, override, hint):
    code, _, err = equipoise("fit", override, "trainer.fast_dev_run=true")
    assert code == 0
    assert hint in err


@pytest.mark.thorough
def test_a_key_that_another_refers_to(project, equipoise):
    write(project, {"conf/speed/fast.yaml": "# @package _global_\nmodule: {lr: 0.9}\n"})
    for overrides in (
        ("+rate=0.3", "module.lr=${rate}"),
        ("+tag=one", "hydra.run.dir=runs/${tag}"),
        ("+speed=fast",),
    ):
        code, _, err = equipoise("fit", *overrides, "trainer.fast_dev_run=true")
        assert code == 0
        assert "nothing reads" not in err
    assert (project / "runs" / "one").is_dir()


LOADER = """
    from torch.utils.data import DataLoader
    from tiny.data import Points

    class Sized(Points):
        def __init__(self, *, count, batch_size=4, num_workers=0):
            super().__init__(count=count)
            self.batch_size, self.num_workers = batch_size, num_workers

        def loader(self):
            return DataLoader(self.points, batch_size=self.batch_size, num_workers=self.num_workers)

        train_dataloader = val_dataloader = loader
    """


@pytest.mark.thorough
@pytest.mark.parametrize("value", ["batch_size=0", "num_workers=-1"])
def test_a_loader_that_torch_refuses(project, equipoise, value):
    write(project, {"tiny/sized.py": LOADER})
    code, _, err = equipoise("fit", "data._target_=tiny.sized.Sized", f"+data.{value}")
    assert code == 2
    assert err.startswith("equipoise: torch refuses a loader in `Sized.")
    assert value.partition("=")[0] in err
    assert "Traceback" not in err
