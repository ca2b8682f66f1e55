"""The flags of the run stages."""

__all__ = ["STAGE_FLAGS"]

# Hydra's flags, and `--debug`, which is taken out before Hydra reads the arguments.
STAGE_FLAGS = {
    "--cfg": "print the configuration instead of running it: --cfg job",
    "--config-dir": "a folder of configurations to look in before ./conf; its config.yaml is the primary one",
    "--config-name": "another primary configuration than config.yaml",
    "--config-path": "another folder of the primary configuration",
    "--debug": "show the traceback of an error",
    "--help": "print this, or explain the keys that follow",
    "--hydra-help": "the help of Hydra, which composes the configuration",
    "--info": "where the configuration comes from: --info defaults, --info searchpath",
    "--multirun": "a sweep: one run for each combination of values, as in module.lr=0.1,0.01",
    "--package": "the part of the configuration that --cfg prints",
    "--resolve": "print values in place of references to them",
    "--run": "one run, which is the default",
    "--version": "the version",
}
